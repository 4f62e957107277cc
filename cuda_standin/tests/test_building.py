"""What a build needs, and what it says where that is missing."""

import ctypes
import os
import re
import subprocess
import sys
import sysconfig

import pytest
from cuda_standin.settings import StandinError

from cuda_standin import build, headers, loading, symbols


@pytest.fixture
def torch_without_cuda(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    return tmp_path


@pytest.fixture
def torch_for_cuda_13(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "version.py").write_text("__version__ = '2.99.0'\ncuda: Optional[str] = '13.0'\n")
    return tmp_path


def test_a_torch_without_cuda_is_refused(torch_without_cuda):
    with pytest.raises(StandinError, match="is built without CUDA. Install a CUDA build"):
        build.libraries(torch_without_cuda)


def test_without_a_compiler_it_says_which(torch_for_cuda_13, monkeypatch, tmp_path):
    monkeypatch.setenv("STANDIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StandinError, match="needs no-such-compiler to build, and it is not on the path"):
        build.libraries(torch_for_cuda_13)


def test_a_folder_without_headers_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("STANDIN_HEADERS", str(tmp_path))
    with pytest.raises(StandinError, match=r"STANDIN_HEADERS='.*': there is no cuda.h in it"):
        headers.folders("13.0")


@pytest.mark.parametrize(
    ("version", "package"),
    [("13.0", "nvidia-cuda-runtime==13.* nvidia-cuda-crt"), ("12.4", "nvidia-cuda-runtime-cu12==12.* nvidia-cuda-crt")],
)
def test_headers_of_another_version_are_named_with_the_package_that_brings_the_right_ones(
    version, package, monkeypatch, tmp_path
):
    monkeypatch.setattr(headers, "_candidates", lambda: [_headers(tmp_path, 11070)])
    with pytest.raises(StandinError) as error:
        headers.folders(version)
    assert f"found CUDA 11.7 in {tmp_path}" in str(error.value)
    assert package in str(error.value).replace("'", "")


def test_the_nearest_headers_of_the_same_major_version_are_taken(monkeypatch, tmp_path):
    near, far = _headers(tmp_path / "near", 12040), _headers(tmp_path / "far", 12090)
    monkeypatch.setattr(headers, "_candidates", lambda: [far, near])
    assert headers.folders("12.1") == [near]


def test_headers_without_crt_take_it_from_others(monkeypatch, tmp_path):
    bare, other = _headers(tmp_path / "bare", 12040), _headers(tmp_path / "other", 13000)
    (bare / "crt").rmdir()
    monkeypatch.setattr(headers, "_candidates", lambda: [bare, other])
    assert headers.folders("12.4") == [bare, other]
    monkeypatch.setattr(headers, "_candidates", lambda: [bare])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(StandinError, match=r"needs the headers crt/ of CUDA, which .* lacks"):
        headers.folders("12.4")
    alone = tmp_path / "nvidia" / "cu13" / "include"  # as the wheel nvidia-cuda-crt has them
    (alone / "crt").mkdir(parents=True)
    assert headers.folders("12.4") == [bare, alone]


def _headers(folder, version):
    (folder / "crt").mkdir(parents=True, exist_ok=True)
    (folder / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    (folder / "driver_types.h").write_text("")
    return folder


def test_a_symbol_that_nobody_has_heard_of_gets_a_stub_that_says_not_supported(tmp_path):
    source = tmp_path / "new.c"
    source.write_text("int cudaFoldSpace(void); int ask(void) { return cudaFoldSpace(); }")
    library = tmp_path / "libnew.so"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").symlink_to(loading.folder / "libcudnn.so.9")  # needs libcudart

    wanted = symbols.needed(tmp_path / "torch", [library])
    runtime = next(name for name in wanted if symbols.stem(name) == "libcudart")
    assert wanted[runtime]["cudaFoldSpace"] is None
    build._link(tmp_path, runtime, [], {"cudaFoldSpace": None}, set(), runtime)

    # the stub asks the runtime that is loaded to note the call
    assert ctypes.CDLL(str(tmp_path / runtime)).cudaFoldSpace() == build._NOT_SUPPORTED["libcudart"]
    import cuda_standin

    assert "cudaFoldSpace" in cuda_standin.unsupported_calls()


@pytest.fixture
def torch_that_asks_for(tmp_path):
    """A PyTorch whose one library asks for these functions, and for CUDA's runtime."""

    def make(*names):
        declared = "".join(f"int {name}(void); " for name in names)
        source = tmp_path / "asks.c"
        source.write_text(f"{declared} int ask(void) {{ return {' + '.join(f'{name}()' for name in names)}; }}")
        lib = tmp_path / "torch" / "lib"
        lib.mkdir(parents=True)
        runtime = loading.folder / (loading.folder / "order.txt").read_text().split()[0]
        link = ["-Wl,--no-as-needed", runtime]
        subprocess.run(["gcc", "-shared", "-fPIC", source, *link, "-o", lib / "libtorch_cuda.so"], check=True)
        return tmp_path / "torch"

    return make


@pytest.mark.parametrize("name", ["cudssCreate", "cufftFold", "nvJitUnheard"])
def test_a_symbol_that_has_no_library_to_go_to_is_named(name, torch_that_asks_for):
    with pytest.raises(StandinError) as error:
        symbols.needed(torch_that_asks_for(name, "cudaFoldSpace"))
    assert f"has no library for {name} (libtorch_cuda.so asks for it). Add the beginning" in str(error.value)


def test_a_library_of_others_may_have_symbols_that_are_not_cudas(torch_that_asks_for, tmp_path):
    (tmp_path / "other.c").write_text("int curl_easy(void); int ask(void) { return curl_easy(); }")
    other = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "other.c", "-o", other], check=True)
    wanted = symbols.needed(torch_that_asks_for("cudaFoldSpace"), [other])
    assert not any("curl_easy" in names for names in wanted.values())


def test_every_symbol_that_pytorch_leaves_undefined_comes_from_somewhere():
    """What is undefined, has no version and is no C++ comes from CUDA, Python or the C runtime: nothing is left."""
    import torch

    folder = type(loading.folder)(torch.__file__).parent
    placed = {name for names in symbols.needed(folder).values() for name in names}
    libraries = list((folder / "lib").glob("lib*.so*"))
    placed |= {name.partition("@")[0] for library in libraries for name in symbols.defined_dynamic(library)}
    undefined = {name for library in libraries for name in symbols._names(library, "--undefined-only", kinds="U")}
    system = ("_Z", "__cxa_", "__gxx_", "pthread_", "Py", "_Py")
    from_somewhere = {name for name in undefined if re.search(r"@(GLIBC|CXXABI|GCC|GOMP|OMP|LIB)", name)}
    assert from_somewhere and len(placed & undefined) > 100
    rest = {name for name in undefined - from_somewhere if name.partition("@")[0] not in placed}
    assert {name for name in rest if not name.startswith(system)} == set()


def test_what_is_built_is_kept_and_found_again(monkeypatch):
    import torch

    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.libraries(type(loading.folder)(torch.__file__).parent) == loading.folder


def test_other_libraries_of_cuda_in_the_environment_get_their_stubs(monkeypatch, tmp_path):
    (tmp_path / "bitsandbytes").mkdir()
    theirs = tmp_path / "bitsandbytes" / "libbitsandbytes_cuda130.so"
    theirs.touch()
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    monkeypatch.setenv("STANDIN_ALSO", os.pathsep.join(["/a.so", "/b.so"]))
    assert [str(path) for path in build._other_libraries()] == [str(theirs), "/a.so", "/b.so"]


def test_of_two_versions_of_a_library_the_one_that_is_imported_gets_its_stubs(monkeypatch, tmp_path):
    for place in ("on_path", "installed"):
        (tmp_path / place / "bitsandbytes").mkdir(parents=True)
        (tmp_path / place / "bitsandbytes" / "libbitsandbytes_cuda121.so").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "on_path"), str(tmp_path / "installed")])
    assert [path.parts[-3] for path in build._other_libraries()] == ["on_path"]
