//! Guests whose files are an image in the OCI's layout.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};
use tar::{Builder, Header};
use tempfile::TempDir;

use crate::harness::{beside_other_guests, finish, finish_at, wormhole};

/// Programs of the image, which it has from this machine.
const PROGRAMS: [&str; 3] = ["/bin/sh", "/usr/bin/id", "/usr/bin/cat"];
const CONFIG: &str = r#"{"os":"linux","architecture":"amd64","config":{"User":"app","Env":["GREETING=hello","OTHER=image"],
    "Entrypoint":["/bin/sh","-c"],"WorkingDir":"/work",
    "Cmd":["echo $GREETING $OTHER $PWD $(id -u) $(id -G); cat upper; cat lower || echo removed"]}}"#;

/// Returns the files that a program needs.
fn closure(program: &str) -> Vec<PathBuf> {
    let listed = Command::new("ldd").arg(program).output().expect("ldd runs");
    let text = String::from_utf8(listed.stdout).expect("text");
    let words = text.split_whitespace();
    let libraries = words.filter(|word| word.starts_with('/'));
    std::iter::once(program)
        .chain(libraries)
        .map(PathBuf::from)
        .collect()
}

fn add(layer: &mut Builder<Vec<u8>>, path: &str, mode: u32, content: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    layer
        .append_data(&mut header, path, content)
        .expect("added");
}

/// Writes a blob, and returns its descriptor.
fn blob(layout: &Path, kind: &str, bytes: &[u8]) -> String {
    let sum: String = Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    fs::write(layout.join("blobs/sha256").join(&sum), bytes).expect("a blob");
    let size = bytes.len();
    format!(
        r#"{{"mediaType":"application/vnd.oci.image.{kind}","digest":"sha256:{sum}","size":{size}}}"#
    )
}

/// Makes a layout of two layers.
fn layout() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    fs::create_dir_all(path.join("blobs/sha256")).expect("folders");
    let mut base = Builder::new(Vec::new());
    let mut files: Vec<_> = PROGRAMS
        .iter()
        .flat_map(|program| closure(program))
        .collect();
    files.sort();
    files.dedup();
    for file in files {
        let name = file
            .strip_prefix("/")
            .expect("a path")
            .to_str()
            .expect("text");
        add(&mut base, name, 0o755, &fs::read(&file).expect("a file"));
    }
    add(
        &mut base,
        "etc/passwd",
        0o644,
        b"root:x:0:0::/:/bin/sh\napp:x:1234:567::/:/bin/sh\n",
    );
    add(&mut base, "etc/group", 0o644, b"data:x:89:other,app\n");
    add(&mut base, "work/lower", 0o644, b"lower\n");
    let mut top = Builder::new(Vec::new());
    add(&mut top, "work/upper", 0o644, b"upper\n");
    add(&mut top, "work/.wh.lower", 0o644, b"");
    let layers = [base, top].map(|layer| {
        let bytes = layer.into_inner().expect("a layer");
        blob(path, "layer.v1.tar", &bytes)
    });
    let config = blob(path, "config.v1+json", CONFIG.as_bytes());
    let manifest = format!(r#"{{"config":{config},"layers":[{}]}}"#, layers.join(","));
    let manifest = blob(path, "manifest.v1+json", manifest.as_bytes());
    fs::write(
        path.join("index.json"),
        format!(r#"{{"manifests":[{manifest}]}}"#),
    )
    .expect("an index");
    fs::write(path.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("a file");
    folder
}

fn is_empty(folder: &TempDir) -> bool {
    fs::read_dir(folder).expect("a folder").next().is_none()
}

#[test]
fn a_guest_has_the_files_of_an_image_and_starts_its_program() {
    let _beside = beside_other_guests();
    let (layout, temporary) = (layout(), tempfile::tempdir().expect("a folder"));
    let mut command = wormhole(&["run", "--env", "OTHER=mine", "--quiet", "--rootfs"]);
    command.arg(layout.path()).env("TMPDIR", temporary.path());
    let run = finish_at(&mut command, true);
    let wanted = "hello mine /work 1234 567 89\nupper\nremoved\n";
    assert_eq!(run.stdout, wanted, "{}", run.stderr);
    assert!(run.status.success(), "{}", run.stderr);
    assert!(is_empty(&temporary));
}

#[test]
fn an_image_that_cannot_be_shown_is_named_and_leaves_nothing() {
    let temporary = tempfile::tempdir().expect("a folder");
    let refused = |layout: &TempDir, words: &str| {
        let mut command = wormhole(&["run", "--rootfs"]);
        command.arg(layout.path()).env("TMPDIR", temporary.path());
        let run = finish(&mut command);
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        assert!(run.stderr.contains(words), "{}", run.stderr);
        assert!(is_empty(&temporary));
    };
    let damaged = layout();
    fs::remove_dir_all(damaged.path().join("blobs")).expect("removed");
    refused(&damaged, "cannot show the image in");
    let empty = tempfile::tempdir().expect("a folder");
    refused(&empty, "has no program of its own");
}

/// The process that unpacks ends with its starter, whatever ends that.
#[test]
fn an_unpacked_image_is_gone_once_its_starter_is() {
    let (layout, temporary) = (layout(), tempfile::tempdir().expect("a folder"));
    for waits in [true, false] {
        let mut process = wormhole(&["unpack"])
            .arg(layout.path())
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let output = process.stdout.take().expect("a pipe");
        if waits {
            let mut line = String::new();
            BufReader::new(output).read_line(&mut line).expect("a line");
            assert!(line.contains("Unpacked") && !is_empty(&temporary), "{line}");
        }
        drop(process.stdin.take());
        assert!(process.wait().expect("it ends").success());
        assert!(is_empty(&temporary));
    }
}
