"""Builds the two libraries of msa_kernels with ninja and puts them into the package.

    msa_kernels/lib/libmsa_ops.so    schemas, input checks, CPU kernels: needs g++ 12 or newer
    msa_kernels/lib/libmsa_cuda.so   the CUDA kernels: needs nvcc and the CUTLASS headers

Both use libtorch's stable ABI alone: they serve every torch from TORCH_TARGET on, any Python. The
CUDA library is built where torch has CUDA and nvcc is found, or on request. Objects stay in
build/native/, a folder a torch, so a rebuild compiles only what changed.

Environment:
    MSA_BUILD_CUDA            1: build the CUDA library, or fail; 0: never; unset: as above
    MSA_CUDA_ARCHS            comma-separated, default 80,90a,100a,120a; sm80/ folders are compiled
                              for all of them (and as PTX of the lowest), sm90/ folders for 90a
    MSA_BUILD_TEST_INTERNALS  1: also build tests/_internals, the test-only binding of host-side
                              C++ (needs pybind11 and Python's headers)
    MSA_WERROR                1: compiler warnings are errors
    CUTLASS_DIR               a folder with include/cutlass, before third_party/cutlass and PyPI's
    CUDA_HOME                 the CUDA toolkit; default: the one that nvcc on PATH names
    CXX                       the C++ compiler, default g++
    MAX_JOBS                  parallel compile jobs, default: the CPU count
"""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
MIN_GCC = 12  # __builtin_shufflevector in the CPU kernels
TORCH_TARGET = (2, 11)
DEFAULT_CUDA_ARCHS = "80,90a,100a,120a"
CUTLASS_PYPI = "nvidia-cutlass==4.2.0.0"


def env_flag(name: str) -> bool | None:
    """True, False, or None where the variable is unset or empty."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"msa_kernels: {name} must be 0, 1 or unset, got {value!r}")
    return None if value == "" else value == "1"


def find_torch() -> tuple[Path, str, bool]:
    """(package folder, version, whether it is a CUDA build) of the torch to build against."""
    try:
        import torch
    except ImportError:
        raise SystemExit(
            "msa_kernels: torch is needed to build (its stable ABI headers). Install torch>=2.11 "
            "and build with "
            "`pip install --no-build-isolation .`, or let pip's build isolation fetch it."
        ) from None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < TORCH_TARGET:
        raise SystemExit(
            f"msa_kernels: torch must be at least {TORCH_TARGET}, got {torch.__version__}"
        )
    return Path(torch.__file__).parent, torch.__version__, torch.version.cuda is not None


def find_cutlass() -> Path:
    """The CUTLASS include folder."""
    candidates = []
    if os.environ.get("CUTLASS_DIR"):
        candidates = [Path(os.environ["CUTLASS_DIR"])]  # an explicit wish: nothing else is tried
    else:
        candidates = [ROOT / "third_party" / "cutlass"]
        spec = importlib.util.find_spec("cutlass_library")
        if spec and spec.origin:
            candidates.append(Path(spec.origin).parent / "source")
    for candidate in candidates:
        if (candidate / "include" / "cutlass" / "cutlass.h").is_file():
            return candidate / "include"
    raise SystemExit(
        "msa_kernels: the CUTLASS headers were not found in "
        + ", ".join(str(candidate) for candidate in candidates)
        + ". Run `git submodule update --init third_party/cutlass`, or `pip install "
        + CUTLASS_PYPI
        + "`, or set CUTLASS_DIR to a folder with include/cutlass."
    )


def find_cuda(torch_has_cuda: bool) -> Path | None:
    """The CUDA toolkit to build the CUDA library with; None: do not build it."""
    wanted = env_flag("MSA_BUILD_CUDA")
    if wanted is False or (wanted is None and not torch_has_cuda):
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    if nvcc and Path(nvcc).is_file():
        # nvcc itself knows its toolkit; its place on PATH may be a link or a wrapper script.
        dryrun = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True)
        for line in dryrun.stderr.splitlines():
            if line.startswith("#$ TOP="):
                return Path(line.removeprefix("#$ TOP=").strip()).resolve()
        raise SystemExit(f"msa_kernels: {nvcc} --dryrun does not name its toolkit: {dryrun.stderr}")
    message = (
        "nvcc was not found on PATH or in CUDA_HOME; "
        "install the CUDA toolkit (12.8 or newer) or set CUDA_HOME"
    )
    if wanted:
        raise SystemExit(f"msa_kernels: MSA_BUILD_CUDA=1, but {message}.")
    print(f"msa_kernels: WARNING: building without the CUDA kernels: {message}.", file=sys.stderr)
    return None


def find_compiler() -> str:
    """The C++ compiler as a command line."""
    compiler = os.environ.get("CXX") or "g++"
    try:
        run = subprocess.run(
            [*shlex.split(compiler), "-dumpfullversion", "-dumpversion", "--version"],
            capture_output=True,
            text=True,
        )
    except OSError:
        raise SystemExit(
            f"msa_kernels: the C++ compiler {compiler!r} was not found; install g++ {MIN_GCC} or "
            "newer, or set CXX"
        ) from None
    version = run.stdout.split("\n")[0].split(".")[0]
    if "clang" not in run.stdout and version.isdigit() and int(version) < MIN_GCC:
        raise SystemExit(
            f"msa_kernels: g++ must be at least {MIN_GCC}, got {version} ({compiler!r}); install "
            "a newer one and name it by CXX"
        )
    return compiler


def git_commit() -> str:
    """The commit of the sources, '+' where they have been changed, 'unknown' outside a checkout."""
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
        ).stdout.strip()
        if Path(run("rev-parse", "--show-toplevel")) != ROOT:
            return "unknown"
        return run("rev-parse", "--short=12", "HEAD") + (
            "+" if run("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_if_changed(path: Path, text: str) -> None:
    """Keeps the time stamp of an unchanged file, on which ninja's decisions rest."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def flag(name: str, value: Path | str) -> str:
    """A compiler flag with a path, which may hold spaces."""
    return name + shlex.quote(str(value))


class NinjaFile:
    """build.ninja of the libraries: compile rules by folder, one link edge a library."""

    def __init__(self, version: str) -> None:
        """Writes build.ninja for a version of the package."""
        from ninja import ninja_syntax

        self.torch_dir, torch_version, torch_has_cuda = find_torch()
        self.compiler = find_compiler()
        # A folder a torch: objects know the headers they came from, and no build undoes another's.
        torch_key = hashlib.sha256(f"{self.torch_dir} {torch_version}".encode()).hexdigest()[:8]
        self.build = ROOT / "build" / "native" / f"torch-{torch_version}-{torch_key}"
        self.cuda_home = find_cuda(torch_has_cuda)
        self.archs = [
            a.strip() for a in (os.environ.get("MSA_CUDA_ARCHS") or DEFAULT_CUDA_ARCHS).split(",")
        ]
        if self.cuda_home and "90a" not in self.archs:
            raise SystemExit(
                "msa_kernels: MSA_CUDA_ARCHS must contain 90a, which the sm90/ kernels are for, "
                f"got {','.join(self.archs)}"
            )
        self.path = self.build / "build.ninja"
        self.outputs: list[Path] = []
        self.build.mkdir(parents=True, exist_ok=True)
        write_if_changed(
            self.build / "include" / "build_config.h",
            "// Generated by setup.py.\n#pragma once\n"
            f'#define MSA_VERSION "{version}"\n'
            f'#define MSA_GIT_COMMIT "{git_commit()}"\n'
            f'#define MSA_TORCH_TARGET "{TORCH_TARGET[0]}.{TORCH_TARGET[1]}"\n'
            f'#define MSA_TORCH_HEADERS "{torch_version}"\n'
            f'#define MSA_CUDA_ARCHS "{",".join(self.archs)}"\n',
        )
        with open(self.build / "build.ninja.new", "w") as file:
            self.writer = ninja_syntax.Writer(file, width=110)
            self._write()
        write_if_changed(self.path, (self.build / "build.ninja.new").read_text())

    def _write(self) -> None:
        writer = self.writer
        torch_include = self.torch_dir / "include"
        includes = [
            flag("-I", CSRC),
            flag("-I", self.build / "include"),
            flag("-isystem ", torch_include),
            flag("-isystem ", torch_include / "torch" / "csrc" / "api" / "include"),
        ]
        target = f"0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}{0:012x}"
        # Relative file names in messages and __FILE__, wherever the checkout lies.
        prefix_map = flag("-ffile-prefix-map=", f"{ROOT}=.")
        common = ["-std=c++17", "-O3", *includes, f"-DTORCH_TARGET_VERSION={target}"]
        host = ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
        warnings = ["-Wall", "-Wextra", *(["-Werror"] if env_flag("MSA_WERROR") else [])]
        writer.variable("ninja_required_version", "1.10")
        # Where ninja keeps its log; else the folder that it runs in.
        writer.variable("builddir", str(self.build))
        writer.variable("cxx", self.compiler)
        cxx_flags = [*common, *host, prefix_map, "-fopenmp-simd", *warnings]
        writer.variable("cxxflags", " ".join(cxx_flags))
        writer.rule(
            "cxx",
            "$cxx -MMD -MF $out.d $cxxflags $defines -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
            description="CXX $out",
        )
        writer.rule("link", "$cxx -shared $in -o $out $libs", description="LINK $out")
        # No run path is needed: torch is in the process before a library of ours is loaded.
        torch_libs = (
            flag("-L", self.torch_dir / "lib")
            + " -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -Wl,--as-needed"
        )

        sources = sorted(CSRC.rglob("*.cpp"))
        shared = [s for s in sources if s.parent.name != "cpu" and s.name != "op_schemas.cpp"]
        cpu = [s for s in sources if s.parent.name == "cpu"] + [
            CSRC / "bindings" / "op_schemas.cpp"
        ]
        cpu_objects = [self._cxx(s, "ops", "-DMSA_DISPATCH_KEY=CPU") for s in shared + cpu]
        self._library("libmsa_ops.so", cpu_objects, f"{torch_libs} -Wl,--no-undefined")

        if self.cuda_home:
            cutlass = find_cutlass()
            cuda_include = (
                flag("-isystem ", self.cuda_home / "include") + " " + flag("-isystem ", cutlass)
            )
            defines = f"-DMSA_DISPATCH_KEY=CUDA -DMSA_BACKEND_CUDA -DUSE_CUDA {cuda_include}"
            writer.variable("nvcc", shlex.quote(str(self.cuda_home / "bin" / "nvcc")))
            host_compiler = shlex.split(self.compiler)[-1]  # behind ccache and the like
            nvcc_flags = [
                *common,
                "--expt-relaxed-constexpr",
                "-lineinfo",
                "-Xptxas=-warn-spills,-warn-lmem-usage",
                f"-Xcompiler={','.join([*host, '-Wall'])}",
                f"-ccbin={shlex.quote(host_compiler)} {cuda_include}",
            ]
            writer.variable("nvccflags", " ".join(nvcc_flags))
            writer.rule(
                "nvcc",
                "$nvcc -MMD -MF $out.d $nvccflags $gencode -c $in -o $out",
                depfile="$out.d",
                deps="gcc",
                description="NVCC $out",
            )
            objects = [self._cxx(s, "cuda", defines) for s in shared]
            objects += [self._nvcc(s) for s in sorted(CSRC.rglob("*.cu"))]
            folders = (
                flag("-L", self.cuda_home / "lib64") + " " + flag("-L", self.cuda_home / "lib")
            )
            cudart = f"{folders} -lcudart_static -lrt -lpthread -ldl"
            self._library("libmsa_cuda.so", objects, f"{torch_libs} {cudart}")

        if env_flag("MSA_BUILD_TEST_INTERNALS"):
            self._test_internals()

    def _cxx(self, source: Path, folder: str, defines: str) -> str:
        target = str(self.build / folder / source.relative_to(ROOT).with_suffix(".o"))
        self.writer.build(target, "cxx", str(source), variables={"defines": defines})
        return target

    def _nvcc(self, source: Path) -> str:
        archs = (
            self.archs if source.parent.name == "sm80" else [a for a in self.archs if a == "90a"]
        )
        gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        if source.parent.name == "sm80":
            lowest = min(archs, key=lambda arch: int(arch.rstrip("af")))
            gencode.append(f"-gencode=arch=compute_{lowest},code=compute_{lowest}")
        target = str(self.build / "cuda" / source.relative_to(ROOT).with_suffix(".o"))
        self.writer.build(target, "nvcc", str(source), variables={"gencode": " ".join(gencode)})
        return target

    def _library(self, name: str, objects: list[str], libs: str) -> None:
        output = self.build / "lib" / name
        # Hidden static symbols of the linked archives too: torch's CUDA runtime must not find ours.
        libs = f"{libs} -Wl,--exclude-libs,ALL"
        self.writer.build(str(output), "link", objects, variables={"libs": libs})
        self.outputs.append(output)

    def _test_internals(self) -> None:
        import pybind11

        python_include = sysconfig.get_path("include")
        includes = [flag("-isystem ", path) for path in (pybind11.get_include(), python_include)]
        defines = " ".join([*includes, "-DMSA_DISPATCH_KEY=CPU"])
        sources = [ROOT / "tests" / "cpp" / "internals.cpp", CSRC / "host" / "tensor_info.cpp"]
        sources += [
            *sorted((CSRC / "checks").glob("*.cpp")),
            *sorted((CSRC / "configs").glob("*.cpp")),
        ]
        objects = [self._cxx(source, "internals", defines) for source in sources]
        output = ROOT / "tests" / f"_internals{sysconfig.get_config_var('EXT_SUFFIX')}"
        self.writer.build(str(output), "link", objects, variables={"libs": ""})

    def run(self) -> None:
        """Builds all outputs, at most MAX_JOBS at a time."""
        import ninja

        command = [os.path.join(ninja.BIN_DIR, "ninja"), "-f", str(self.path)]
        if os.environ.get("MAX_JOBS"):
            command.append(f"-j{os.environ['MAX_JOBS']}")
        if subprocess.run(command).returncode:
            raise SystemExit("msa_kernels: the build failed; the compiler's messages stand above.")


class BuildLibraries(build_ext):
    """Runs ninja and copies the libraries into the package, in place or in the wheel."""

    def run(self) -> None:
        ninja_file = NinjaFile(self.distribution.get_version())
        ninja_file.run()
        lib_dir = self._lib_dir()
        lib_dir.mkdir(parents=True, exist_ok=True)
        for old in lib_dir.glob("libmsa_*.so"):
            if old.name not in {output.name for output in ninja_file.outputs}:
                old.unlink()  # of an earlier build with CUDA: it would be loaded and be out of step
        for output in ninja_file.outputs:
            # A new file, not the old one overwritten: a running process may have it mapped.
            staged = lib_dir / f".{output.name}.new"
            shutil.copy2(output, staged)
            staged.replace(lib_dir / output.name)

    def _lib_dir(self) -> Path:
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        return base / "msa_kernels" / "lib"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in sorted(self._lib_dir().glob("libmsa_*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """The libraries know no Python version: py3-none-<platform>."""

    def run(self) -> None:
        # What an earlier build staged may no longer exist in the sources.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


if __name__ == "__main__":
    setup(
        packages=find_namespace_packages(
            include=["msa_kernels", "msa_kernels.*", "bench", "bench.*"]
        ),
        package_data={"msa_kernels": ["py.typed"], "bench": ["presets/*"]},
        # Only says that the wheel is not pure; BuildLibraries knows the sources.
        ext_modules=[Extension("msa_kernels.lib", sources=[])],
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
    )
