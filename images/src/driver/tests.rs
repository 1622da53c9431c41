use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use lzma_rust2::{XzOptions, XzWriter};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use tar::{Builder, EntryType, Header};

use super::fuzzing::{VERSION, run_file};
use super::*;

/// Header of a library for x86-64 without any section.
const NO_NAMES: &[u8] = b"\x7fELF";

/// A file of a made archive: its path, kind and content, or the target of a link.
type Entry<'a> = (&'a str, EntryType, &'a [u8]);

/// Makes a shared library with the name `own`.
fn library(folder: &Path, own: &str) -> Vec<u8> {
    let name = format!("-Wl,-soname,{own}");
    crate::libraries::tests::compile(folder, "made.so", true, &[&name]);
    fs::read(folder.join("made.so")).expect("it was compiled")
}

fn tar(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for &(name, kind, data) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        // The checks of the writing library are not wanted.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        let is_link = kind == EntryType::Symlink || kind == EntryType::Link;
        if is_link {
            let target = std::str::from_utf8(data).expect("a path");
            header.set_link_name_literal(target).expect("a short path");
        }
        let data = if is_link { &[] } else { data };
        header.set_size(data.len() as u64);
        header.set_cksum();
        archive.append(&header, data).expect("it is in memory");
    }
    archive.into_inner().expect("it is in memory")
}

/// Makes a shared library that needs another one, whose name may be a path.
fn library_that_needs(folder: &Path, needed: &str) -> Vec<u8> {
    let name = format!("-Wl,-soname,{needed}");
    crate::libraries::tests::compile(folder, "needed.so", true, &[&name]);
    let path = folder.join("needed.so").display().to_string();
    let options = ["-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed", &path];
    crate::libraries::tests::compile(folder, "made.so", true, &options);
    fs::read(folder.join("made.so")).expect("it was compiled")
}

/// Files of a driver.
fn whole(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let kbuild = format!("ccflags-y += -DNV_VERSION_STRING=\\\"{VERSION}\\\"\n");
    let mut files = vec![
        ("./kernel-open/Kbuild".to_owned(), kbuild.into_bytes()),
        (
            "./kernel-open/nvidia/nv.c".to_owned(),
            b"int nv;\n".to_vec(),
        ),
        ("./firmware/gsp_ga10x.bin".to_owned(), b"firmware".to_vec()),
        ("./firmware/README".to_owned(), b"text".to_vec()),
        ("./nvidia-installer".to_owned(), b"#!/bin/sh\n".to_vec()),
        (format!("./libGL.so.{VERSION}"), NO_NAMES.to_vec()),
    ];
    for (name, link) in [
        ("libcuda", "libcuda.so.1"),
        ("libnvidia-ml", "libnvidia-ml.so.1"),
        ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
        ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    ] {
        files.push((format!("./{name}.so.{VERSION}"), library(folder, link)));
    }
    files
}

fn tar_of(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let entries = files.iter();
    let entries: Vec<Entry<'_>> = entries
        .map(|(name, data)| (name.as_str(), EntryType::Regular, data.as_slice()))
        .collect();
    tar(&entries)
}

fn opened(folder: &Path, bytes: &[u8]) -> Result<RunFile, DriverError> {
    let path = folder.join("driver.run");
    fs::write(&path, bytes).expect("room");
    RunFile::open(&path)
}

fn unpacked(folder: &Path, bytes: &[u8]) -> Result<Parts, ImageError> {
    let place = folder.join("unpacked");
    let _ = fs::remove_dir_all(&place);
    fs::create_dir(&place).expect("a folder");
    opened(folder, bytes)?.unpack(&place)
}

#[test]
fn a_driver_is_unpacked_whatever_its_compression_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let archive = tar_of(&whole(folder));
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&archive).expect("it is in memory");
    let mut xz = XzWriter::new(Vec::new(), XzOptions::with_preset(1)).expect("a writer");
    xz.write_all(&archive).expect("it is in memory");
    let archives: [Vec<u8>; 4] = [
        archive.clone(),
        gzip.finish().expect("it is in memory"),
        xz.finish().expect("it is in memory"),
        compress_to_vec(&archive[..], CompressionLevel::Fastest),
    ];
    for archive in &archives {
        let parts = unpacked(folder, &run_file(archive, |script| script)).expect("a driver");
        assert_eq!(
            (parts.version.as_str(), parts.origin.as_str()),
            (VERSION, "driver.run")
        );
        let names = parts.libraries.iter().map(|library| library.link.as_str());
        assert_eq!(
            names.collect::<Vec<_>>(),
            [
                "libcuda.so.1",
                "libnvidia-ml.so.1",
                "libnvidia-ptxjitcompiler.so.1",
                "libnvidia-nvvm.so.4"
            ]
        );
        assert!(parts.needed.contains("libc.so.6"), "{:?}", parts.needed);
        assert_eq!(parts.firmware.len(), 1);
        assert!(parts.sources.join("nvidia/nv.c").is_file());
        let place = folder.join("unpacked");
        assert!(!place.join("nvidia-installer").exists());
    }
}

#[test]
fn what_is_no_driver_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let archive = tar_of(&[]);
    let good = run_file(&archive, |script| script);
    let refused = |bytes: &[u8], words: &str| {
        let error = opened(folder, bytes).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    };
    opened(folder, &good).expect("its header is right");
    for length in [0, 1, 10, 100, good.len() - archive.len() - 1] {
        refused(&good[..length], "is not NVIDIA's driver");
    }
    refused(&good[..good.len() - 1], "is truncated or damaged");
    let mut damaged = good.clone();
    *damaged.last_mut().expect("a byte") ^= 1;
    refused(&damaged, "is truncated or damaged");
    refused(&archive, "is not NVIDIA's driver");
    let changed = |from: &str, to: &str| run_file(&archive, |script| script.replace(from, to));
    for (from, to) in [
        ("NVIDIA Accel", "Another Accel"),
        (
            &format!("version_string={VERSION}"),
            "version_string=580/../..",
        ),
        (&format!("version_string={VERSION}"), "version_string="),
        ("skip=12", "skip=0"),
        ("skip=12", "skip=99999999999999999999"),
        ("skip=12", "skip=4000000000"),
        ("#! /bin/sh", "MZ"),
    ] {
        refused(&changed(from, to), "is not NVIDIA's driver");
    }
    refused(
        &changed("\"x86_64\"", "\"aarch64\""),
        "is a driver for aarch64",
    );
    refused(
        &changed("version_string=580", "version_string=535"),
        "needs 550",
    );
    let error = RunFile::open(folder).expect_err("a folder").to_string();
    assert!(error.contains("is not NVIDIA's driver"), "{error}");
    let error = RunFile::open(Path::new("/no/such.run")).expect_err("nothing is there");
    assert!(error.to_string().contains("cannot read"), "{error}");
    let pipe = folder.join("pipe");
    let device = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, device, mode, 0).expect("a pipe");
    assert!(RunFile::open(&pipe).is_err());
}

#[test]
fn a_driver_that_lacks_a_part_or_mixes_versions_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let files = whole(folder);
    let without = |start: &str, words: &str| {
        let files: Vec<_> = files
            .iter()
            .filter(|(name, _)| !name.starts_with(start))
            .cloned()
            .collect();
        let error = unpacked(folder, &run_file(&tar_of(&files), |script| script));
        let error = error.expect_err(start).to_string();
        assert!(error.contains(words), "{error}");
    };
    without("./kernel-open", "has no sources of open kernel modules");
    without("./firmware", "has no firmware");
    without("./libcuda", "has no libcuda");
    let changed = |name: &str, data: &[u8]| {
        let mut files = files.clone();
        let file = files.iter_mut().find(|(found, _)| found.starts_with(name));
        data.clone_into(&mut file.expect(name).1);
        unpacked(folder, &run_file(&tar_of(&files), |script| script)).expect_err(name)
    };
    let error = changed("./kernel-open/Kbuild", b"-DNV_VERSION_STRING=\\\"580.1\\\"");
    assert!(error.to_string().contains("is not of driver"), "{error}");
    let error = changed("./libcuda", b"no library");
    assert!(matches!(error, ImageError::Elf { .. }), "{error}");
    let error = changed("./libcuda", &library(folder, "../../libcuda.so.1"));
    assert!(error.to_string().contains("is not of driver"), "{error}");
    for name in ["/dev/zero", "../libm.so.6", "a b.so", "a.so\nmodule /b"] {
        let error = changed("./libcuda", &library_that_needs(folder, name)).to_string();
        assert!(error.contains("which is no file's name"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    // Its compression ends too early, though the sum is right.
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&tar_of(&files)).expect("it is in memory");
    let gzip = gzip.finish().expect("it is in memory");
    let short = run_file(&gzip[..gzip.len() / 2], |script| script);
    let error = unpacked(folder, &short).expect_err("it is too short");
    assert!(error.to_string().contains("cannot unpack"), "{error}");
}

#[test]
fn a_hostile_archive_writes_nothing_outside_of_its_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let outside = folder.join("outside");
    let there = outside.display().to_string();
    let write = |entries: &[Entry<'_>]| {
        let error = unpacked(folder, &run_file(&tar(entries), |script| script));
        assert!(!outside.exists(), "{entries:?}");
        error.expect_err("no driver").to_string()
    };
    let file = EntryType::Regular;
    for name in ["../outside", "kernel-open/../../outside", there.as_str()] {
        let error = write(&[(name, file, b"text")]);
        assert!(error.contains("lies outside of it"), "{error}");
    }
    for kind in [EntryType::Symlink, EntryType::Link] {
        // Links are left out, so that the file is written into a folder.
        let above = ("kernel-open/up", kind, &b"../.."[..]);
        let error = write(&[above, ("kernel-open/up/outside", file, b"text")]);
        assert!(error.contains("has no sources"), "{error}");
        let place = folder.join("unpacked/kernel-open/up");
        assert!(place.join("outside").is_file() && !place.is_symlink());
        let kbuild = ("kernel-open/Kbuild", kind, &b"/etc/passwd"[..]);
        let error = write(&[kbuild]);
        assert!(error.contains("has no sources"), "{error}");
    }
    // One byte of the archive can say that thousands of zeros follow, whose sizes are added first.
    let mut header = Header::new_gnu();
    header.set_path("kernel-open/zeros").expect("a short path");
    header.set_size(u64::MAX >> 2);
    header.set_entry_type(file);
    header.set_mode(0o644);
    header.set_cksum();
    let bomb = run_file(header.as_bytes(), |script| script);
    let error = unpacked(folder, &bomb).expect_err("a bomb").to_string();
    assert!(error.contains("has more than"), "{error}");
    // A name of many bytes would be read into memory.
    for kind in [
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
    ] {
        let long = vec![b'a'; 1 << 20];
        let error = write(&[
            ("././@LongLink", kind, &long),
            ("kernel-open/a", file, b"text"),
        ]);
        assert!(error.contains("cannot unpack"), "{error}");
    }
    // A sparse file without a byte has any size, and would give the headers behind it as much.
    let mut sparse = Header::new_gnu();
    sparse.set_path("kernel-open/holes").expect("a short path");
    sparse.set_entry_type(EntryType::GNUSparse);
    sparse.set_mode(0o644);
    sparse.set_size(0);
    let gnu = sparse.as_gnu_mut().expect("it is GNU's");
    gnu.set_real_size(2 << 30);
    gnu.sparse[0].set_offset(2 << 30);
    gnu.sparse[0].set_length(0);
    sparse.set_cksum();
    let long = vec![b'a'; 1 << 20];
    let behind = tar(&[
        ("././@LongLink", EntryType::GNULongName, &long),
        ("kernel-open/a", file, b"text"),
    ]);
    let archive = [sparse.as_bytes().as_slice(), &behind].concat();
    let error = unpacked(folder, &run_file(&archive, |script| script)).expect_err("no driver");
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert_eq!(source.as_deref(), Some("a file in it is sparse"), "{error}");
    let deep = [b"kernel-open/".to_vec(), b"a/".repeat(100), b"a".to_vec()].concat();
    let deep = tar(&[
        ("././@LongLink", EntryType::GNULongName, &deep),
        ("kernel-open/a", file, b"text"),
    ]);
    let error = unpacked(folder, &run_file(&deep, |script| script)).expect_err("no driver");
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert_eq!(
        source.as_deref(),
        Some("a file in it lies too deep"),
        "{error}"
    );
    let name = [b"kernel-open/".to_vec(), vec![b'a'; 200]].concat();
    let long = ("././@LongLink", EntryType::GNULongName, &name[..]);
    let error = write(&[long, ("kernel-open/a", file, &[b'b'; 100_000])]);
    assert!(error.contains("has no sources"), "{error}");
}

#[test]
fn an_image_gets_the_modules_firmware_and_libraries_under_the_names_that_are_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let parts = unpacked(folder, &run_file(&tar_of(&whole(folder)), |script| script));
    let parts = parts.expect("a driver");
    let kernel = folder.join("kernel-modules");
    fs::create_dir_all(kernel.join("kernel")).expect("a folder");
    fs::write(kernel.join("modules.builtin"), "kernel/lib/built_in.ko\n").expect("room");
    let mut modules = Modules::in_folder(&kernel).expect("a list");
    for (name, depends) in [("nvidia", "built_in"), ("nvidia-uvm", "nvidia")] {
        let path = folder.join(name);
        let source = format!(
            "__attribute__((section(\".modinfo\"), used)) static const char d[] = \"depends={depends}\";"
        );
        compile_module(folder, &path, &source);
        modules.add(name, path);
    }
    let (driver, archive) = pack(&parts, &modules, "6.1.0-1-cloud-amd64").expect("all is there");
    assert_eq!(driver.release, "6.1.0-1-cloud-amd64");
    assert_eq!(
        driver.modules,
        [
            ("/usr/lib/modules/wormhole/nvidia.ko".into(), String::new()),
            (
                "/usr/lib/modules/wormhole/nvidia_uvm.ko".into(),
                "uvm_disable_hmm=1".to_owned()
            )
        ]
    );
    let has = |name: &str| {
        archive
            .windows(name.len())
            .any(|part| part == name.as_bytes())
    };
    for name in [
        "etc/wormhole/driver\0",
        "usr/lib/modules/wormhole/nvidia_uvm.ko\0",
        "usr/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin\0",
        "usr/lib/wormhole/driver/libcuda.so.580.95.05\0",
        "usr/lib/wormhole/driver/libcuda.so.1\0",
        "usr/lib/wormhole/driver/libnvidia-nvvm.so.4\0",
    ] {
        assert!(has(name), "{name:?}");
    }
    assert!(!has("libGL"));
}

fn compile_module(folder: &Path, output: &Path, source: &str) {
    let text = folder.join("module.c");
    fs::write(&text, source).expect("room");
    let mut command = std::process::Command::new("cc");
    let status = command.arg("-c").arg("-o").arg(output).arg(&text).status();
    assert!(status.expect("the compiler runs").success());
}

#[test]
fn only_root_builds_a_driver() {
    let error = check_machine(false)
        .expect_err("a user may not")
        .to_string();
    assert!(error.contains("run the command as root"), "{error}");
}

#[test]
fn sources_that_a_user_names_are_a_file_or_debians_packages() {
    let parsed = |text: &str| text.parse::<DriverSource>().expect("any text is one");
    assert_eq!(parsed("debian"), DriverSource::Debian);
    assert_eq!(parsed("./debian"), DriverSource::File("./debian".into()));
}

#[test]
fn a_file_is_no_link_and_versions_are_numbers() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    File::create(&file).expect("a file");
    symlink(&file, &link).expect("a link");
    assert!(parts::is_file(&file) && !parts::is_file(&link));
    for (text, is_one) in [
        ("580.95.05", true),
        ("555.42", true),
        ("580", false),
        ("580..1", false),
        ("580.1/2", false),
        ("", false),
        (&"1.".repeat(20), false),
    ] {
        assert_eq!(is_version(text), is_one, "{text}");
    }
    let error = io::Error::other("a cause");
    let error = DriverError::Unpack {
        path: "driver.run".into(),
        source: error,
    };
    assert!(std::error::Error::source(&error).is_some());
}
