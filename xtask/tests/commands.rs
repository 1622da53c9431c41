//! Runs developer commands in a small form, so that those of the pages work.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use object::read::archive::ArchiveFile;
use object::{Object, ObjectSection};

/// Folder of images, and the sections of an object that hold its code for GPUs.
const FIXTURES: [&str; 2] = ["ptx", "cuda"];
const GPU_SECTIONS: [&str; 2] = ["__nv_relfatbin", ".nv_fatbin"];

fn root() -> &'static Path {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("xtask lies in the project's root")
}

fn xtask() -> Command {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
}

fn said(output: &Output) -> String {
    let streams = [&output.stdout, &output.stderr];
    streams.map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Returns the parts of an image that nvcc makes: all of a fat binary, and the sections for GPUs of objects, whose other
/// sections the machine's own compiler makes.
fn made_by_nvcc(path: &Path) -> Vec<Vec<u8>> {
    let image = fs::read(path).expect("an image");
    let sections = |object: &[u8]| -> Vec<Vec<u8>> {
        let file = object::File::parse(object).expect("an object");
        let sections = GPU_SECTIONS.iter();
        let sections = sections.filter_map(|name| file.section_by_name(name));
        let data = sections.map(|section| section.data().expect("its bytes").to_vec());
        data.collect()
    };
    match path.extension().and_then(|end| end.to_str()) {
        Some("o") => sections(&image),
        Some("a") => {
            let archive = ArchiveFile::parse(&*image).expect("an archive");
            let members = archive.members().map(|member| member.expect("a member"));
            let objects = members.map(|member| member.data(&*image).expect("its bytes"));
            objects.flat_map(sections).collect()
        }
        _ => vec![image],
    }
}

#[test]
fn the_committed_fixtures_are_those_that_their_sources_make() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = xtask()
        .args(["fixtures", "--into"])
        .arg(folder.path())
        .output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{}", said(&output));
    let mut compared = 0;
    for device in FIXTURES {
        let committed = root().join(format!("backend-vm/{device}/tests/data"));
        for made in fs::read_dir(folder.path().join(device)).expect("the images") {
            let made = made.expect("an image");
            let parts = made_by_nvcc(&made.path());
            assert!(!parts.is_empty(), "{made:?} has no code for GPUs");
            let same = parts == made_by_nvcc(&committed.join(made.file_name()));
            assert!(same, "{made:?} is outdated: run `cargo xtask fixtures`");
            compared += 1;
        }
    }
    assert_eq!(compared, 7);
}

/// A program that doubles numbers, or trebles them.
const PROGRAM: &str = r#"
#include <cstdio>
__global__ void multiply(int *numbers) { numbers[threadIdx.x] *= FACTOR; }
int main() {
    int *numbers;
    if (cudaMallocManaged(&numbers, 32 * sizeof(int)) != cudaSuccess) return 1;
    for (int i = 0; i < 32; i++) numbers[i] = i;
    multiply<<<1, 32>>>(numbers);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    for (int i = 0; i < 32; i++)
        if (numbers[i] != 2 * i) { printf("Test failed\n"); return 0; }
    printf("Test passed\n");
}
"#;

#[test]
fn programs_of_a_checkout_are_built_and_those_that_fail_are_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let samples = folder.path().join("Samples/0_Introduction");
    for (name, factor) in [("doubles", "2"), ("trebles", "3")] {
        let sources = samples.join(name);
        fs::create_dir_all(&sources).expect("a folder");
        let list = format!("add_executable({name} {name}.cu)\n");
        fs::write(sources.join("CMakeLists.txt"), list).expect("a file");
        let program = PROGRAM.replace("FACTOR", factor);
        fs::write(sources.join(format!("{name}.cu")), program).expect("a file");
    }
    let output = xtask()
        .args(["foreign", "samples"])
        .arg(folder.path())
        .arg("--output")
        .arg(folder.path().join("built"))
        .output();
    let output = output.expect("it starts");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for line in [
        "1 programs end alike, 1 differ, 0 were not built\n",
        "| trebles | says `Test failed` |\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

/// Tests that pass, fail, are skipped, end their process, hang, and end differently when they are forwarded.
const TESTS: &str = r#"
import ctypes, os, signal, time
import pytest

def forwarded():
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False

@pytest.mark.parametrize("number", range(20))
def test_passes(number): pass
def test_fails(): assert 1 == 2
def test_skipped(): pytest.skip("not today")
def test_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
def test_leaves(): os._exit(0)
def test_behind_a_crash(): pass
def test_forwarded_only(): assert forwarded()
def test_natively_only(): assert not forwarded()
def test_hangs_forwarded():
    if forwarded(): time.sleep(1000)
def test_behind_one_that_hangs(): pass
def test_once():
    with open("runs", "a+") as file:
        assert file.write("x") and file.tell() != 2
def test_poisons():
    os.environ["POISONED"] = ""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
@pytest.mark.parametrize("number", range(9))
def test_behind_poison(number): assert "POISONED" not in os.environ
def test_must_not_run(): assert False
"#;

/// Returns the lines of a text that begin with these words, without them.
fn behind<'a>(text: &'a str, words: &str) -> Vec<&'a str> {
    let lines = text.lines();
    lines.filter_map(|line| line.strip_prefix(words)).collect()
}

#[test]
fn tests_of_a_suite_are_compared_one_by_one() {
    if !fits(11..=14) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let suite = folder.path().join("suite");
    fs::create_dir(&suite).expect("a folder");
    fs::write(suite.join("test_ends.py"), TESTS).expect("a file");
    let multicast = "def test_multicast():\n    'cuMulticastCreate'\n";
    fs::write(suite.join("test_multicast.py"), multicast).expect("a file");
    let forwarded = "import ctypes\nctypes.CDLL('libcuda.so.1')\n";
    fs::write(suite.join("test_uncollected.py"), forwarded).expect("a file");
    let deselected = folder.path().join("deselected.txt");
    fs::write(&deselected, "# A list.\n*::test_must_*: it is ill\n").expect("a file");
    let results = folder.path().join("results");
    let output = xtask()
        .args(["foreign", "pytest", "--against", "native"])
        .args(["--jobs", "2", "--seconds", "5", "--python"])
        .arg(root().join("target/python/bin/python"))
        .args([Path::new("--deselect"), &deselected])
        .args([Path::new("--output"), &results])
        .arg(&suite)
        .output();
    let output = output.expect("it starts");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for way in ["native", "cpu"] {
        let lines = behind(&text, &format!("{way}: "));
        assert_eq!(lines.len(), if way == "cpu" { 3 } else { 4 }, "{text}");
        assert!(lines[0].starts_with("40 tests: "), "{text}");
        assert!(lines[0].contains(", 1 skipped, 0 not reached; "), "{text}");
        for reason in ["it is ill", "its file names cuMulticastCreate"] {
            assert!(lines.contains(&&*format!("1 not run: {reason}")), "{text}");
        }
    }
    let counts = "36 tests end alike, 4 differ, 1 differ in the suite, but not alone; 0 did not end in each way\n";
    assert!(text.contains(counts), "{text}");

    let differences = fs::read_to_string(results.join("differences.txt")).expect("differences");
    let (steady, once) = differences
        .split_once("differ in the suite, but not alone:\n")
        .expect("both kinds");
    let hanging = "failed: took longer than 5 s, and was ended";
    assert_eq!(
        behind(steady, "test_ends.py::test_hangs_forwarded\t"),
        [format!(
            "native passed\tcpu {hanging}\talone native passed\talone cpu {hanging}"
        )]
    );
    assert_eq!(
        behind(steady, "test_ends.py::test_natively_only\tnative passed\t").len(),
        1
    );
    let file = behind(steady, "test_uncollected.py\tnative failed: ");
    assert!(file[0].ends_with("\tcpu passed"), "{differences}");
    let only = behind(steady, "test_ends.py::test_forwarded_only\tnative failed: ");
    assert!(only[0].ends_with("\talone cpu passed"), "{differences}");
    assert_eq!(
        behind(once, "test_ends.py::test_once\tnative passed\tcpu failed: ").len(),
        1
    );

    let native = fs::read_to_string(results.join("native.tsv")).expect("results");
    for ended in [
        "failed\ttest_ends.py::test_crashes\tended its process: SIGSEGV",
        "failed\ttest_ends.py::test_leaves\tended its process: status 0",
        "passed\ttest_ends.py::test_behind_a_crash\t",
        "passed\ttest_ends.py::test_behind_poison[8]\t",
        "passed\ttest_ends.py::test_behind_one_that_hangs\t",
        "skipped\ttest_ends.py::test_skipped\tnot today",
    ] {
        assert!(native.lines().any(|line| line == ended), "{native}");
    }
}

#[test]
fn a_suite_that_is_interrupted_reports_what_ended() {
    if !fits(11..=14) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let [suite, results] = ["suite", "results"].map(|name| folder.path().join(name));
    fs::create_dir(&suite).expect("a folder");
    let tests = "import time\ndef test_passes(): pass\ndef test_hangs(): open('hangs', 'w'); time.sleep(1000)\n";
    fs::write(suite.join("test_ends.py"), tests).expect("a file");
    let mut runner = Command::new("python3")
        .arg(root().join("xtask/pytest/suite"))
        .args(["--way", "native", "--python"])
        .arg(root().join("target/python/bin/python"))
        .args([Path::new("--output"), &results])
        .arg(&suite)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    while !suite.join("hangs").exists() {
        let ended = runner.try_wait().expect("its state");
        assert_eq!(ended, None, "it ended before its tests");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").arg(runner.id().to_string()).status();
    assert!(killed.expect("it starts").success());
    let output = runner.wait_with_output().expect("its end");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let counts = "native: 2 tests: 1 passed, 0 failed, 0 skipped, 1 not reached; ";
    assert!(text.starts_with(counts), "{text}");
    let native = fs::read_to_string(results.join("native.tsv")).expect("results");
    assert_eq!(native, "passed\ttest_ends.py::test_passes\t\n");
}

/// QEMU's emulation of virtualization fails now and then, and never thrice.
#[test]
fn the_benchmark_of_monitors_boots_all_of_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("figures.json");
    let passes = |_| {
        let mut bench = xtask();
        bench.args(["bench", "monitors", "--rounds", "1", "--json"]);
        let output = bench.arg(&json).output().expect("it starts");
        println!("{}", said(&output));
        output.status.success()
    };
    assert!((0..3).any(passes));
    let figures = fs::read(json).expect("the figures");
    let figures: serde_json::Value = serde_json::from_slice(&figures).expect("JSON");
    let rows = figures["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 9, "{figures}");
    for row in rows {
        assert!(row["ratio"].as_f64() > Some(0.0), "{row}");
        if row["unit"] == "MiB" {
            let own = &row["ways"]["wormhole"]["median"];
            assert!(own.as_f64() <= Some(8.0), "{row}");
        }
    }
}

/// Runs a command that runs tests of Python packages from PyPI, and returns its last line.
fn last_line(arguments: &[&str]) -> String {
    let output = xtask().args(arguments).output().expect("it starts");
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().last().expect("a line").to_owned()
}

/// Returns whether the packages exist for this machine's Python 3, by its minor version.
fn fits(versions: std::ops::RangeInclusive<u32>) -> bool {
    let command = "import sys; print(sys.version_info.minor)";
    let output = Command::new("python3").args(["-c", command]).output();
    let output = output.expect("it starts");
    let version = String::from_utf8_lossy(&output.stdout);
    let fits = versions.contains(&version.trim().parse().expect("a number"));
    if !fits {
        println!("skipped: there are no packages for Python 3.{version}");
    }
    fits
}

/// Runs programs of `programs/python`, which must pass at `process` placement, and returns the output.
fn passes(programs: &[&str], options: &[&str]) -> String {
    let names = programs.iter().flat_map(|name| ["--program", name]);
    let output = xtask().arg("python").args(names).args(options).output();
    let output = output.expect("it starts");
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    for name in programs {
        assert_passes(&text, name, "--placement process");
    }
    text.into_owned()
}

fn assert_passes(text: &str, program: &str, place: &str) {
    let words = format!(": PASS {program} ");
    let passed = |line: &str| line.contains(place) && line.contains(&words);
    assert!(text.lines().any(passed), "{program}, {place}: {text}");
}

#[test]
fn numpy_numba_and_cupy_pass_in_a_guest() {
    if !fits(11..=14) {
        return;
    }
    let programs = ["cupy_arrays", "numpy_arrays", "vector_add", "arrays"];
    let text = passes(&programs, &["--guest"]);
    for program in programs {
        assert_passes(&text, program, "in a guest");
    }
}

#[test]
fn a_module_of_numbas_tests_passes_on_the_cpu_device() {
    if !fits(11..=14) {
        return;
    }
    assert_eq!(
        last_line(&["numba", "--module", "cudapy.test_blackscholes"]),
        "numba: 1 passed, 0 failed, 0 skipped (100 % of those applicable passed)"
    );
}

#[test]
fn a_module_of_the_bindings_tests_passes_on_the_cpu_device() {
    if !fits(9..=12) {
        return;
    }
    let small = ["--bindings", "12.6", "--module", "test_kernelParams"];
    assert_eq!(
        last_line(&[&["cuda-python"], &small[..]].concat()),
        "cuda-python 12.6: 7 passed, 0 failed, 0 skipped (100 % of those applicable passed)"
    );
}
