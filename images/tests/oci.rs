//! Images of the OCI's layout, made here: orderly ones, and ones that attack.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;
use wormhole_images::{ImageProgram, OciError, is_layout, remove_unpacked, unpack};

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = r#"{"os":"linux","architecture":"amd64","config":{"User":"1000:100","Env":["A=b","PATH=/x"],
    "Entrypoint":["/bin/tool"],"Cmd":null,"WorkingDir":"/work"}}"#;

/// A layer under construction.
struct Layer(Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    /// Adds an entry with any name, as an attacker would.
    fn add(mut self, kind: EntryType, name: &str, target: &str, mode: u32, content: &str) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(1000);
        header.set_size(content.len() as u64);
        let old = header.as_old_mut();
        old.name[..name.len()].copy_from_slice(name.as_bytes());
        old.linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        self.0.append(&header, content.as_bytes()).expect("added");
        self
    }

    fn file(self, name: &str, content: &str) -> Self {
        self.add(EntryType::Regular, name, "", 0o644, content)
    }

    fn folder(self, name: &str) -> Self {
        self.add(EntryType::Directory, name, "", 0o755, "")
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.add(EntryType::Symlink, name, target, 0o777, "")
    }

    fn done(self) -> Vec<u8> {
        self.0.into_inner().expect("a layer")
    }
}

/// A layout under construction.
struct Layout(TempDir);

impl Layout {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(folder.path().join("blobs/sha256")).expect("folders");
        let version = r#"{"imageLayoutVersion":"1.0.0"}"#;
        fs::write(folder.path().join("oci-layout"), version).expect("a file");
        Self(folder)
    }

    /// Adds a blob, and returns its descriptor.
    fn blob(&self, kind: &str, bytes: &[u8]) -> String {
        let sum = Sha256::digest(bytes);
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        let place = self.0.path().join("blobs/sha256").join(&sum);
        fs::write(place, bytes).expect("a blob");
        let size = bytes.len();
        format!(r#""mediaType":"{kind}","digest":"sha256:{sum}","size":{size}"#)
    }

    fn manifest(&self, config: &str, layers: &[(&str, Vec<u8>)]) -> String {
        let config = self.blob(
            "application/vnd.oci.image.config.v1+json",
            config.as_bytes(),
        );
        let layers = layers.iter();
        let layers = layers.map(|(kind, bytes)| format!("{{{}}}", self.blob(kind, bytes)));
        let layers = layers.collect::<Vec<_>>().join(",");
        let manifest = format!(r#"{{"config":{{{config}}},"layers":[{layers}]}}"#);
        self.blob(
            "application/vnd.oci.image.manifest.v1+json",
            manifest.as_bytes(),
        )
    }

    fn index(&self, entries: &[String]) -> String {
        let entries = entries.iter().map(|entry| format!("{{{entry}}}"));
        let entries = entries.collect::<Vec<_>>().join(",");
        format!(r#"{{"manifests":[{entries}]}}"#)
    }

    fn finish(&self, index: &str) {
        fs::write(self.0.path().join("index.json"), index).expect("an index");
    }

    /// Creates a layout of one image.
    fn of(layers: &[(&str, Vec<u8>)]) -> Self {
        let layout = Self::new();
        layout.finish(&layout.index(&[layout.manifest(CONFIG, layers)]));
        layout
    }

    /// Unpacks it into a folder inside of another one.
    fn unpack(&self) -> (TempDir, PathBuf, Result<ImageProgram, OciError>) {
        let outer = tempfile::tempdir().expect("a folder");
        let root = outer.path().join("root");
        fs::create_dir(&root).expect("a folder");
        let unpacked = unpack(self.0.path(), &root);
        (outer, root, unpacked)
    }
}

/// Unpacks layers that must be in order.
fn unpacked(layers: Vec<Layer>) -> (TempDir, PathBuf) {
    let layers: Vec<_> = layers
        .into_iter()
        .map(|layer| (PLAIN, layer.done()))
        .collect();
    let (outer, root, unpacked) = Layout::of(&layers).unpack();
    unpacked.expect("it is unpacked");
    (outer, root)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a file")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = names
        .map(|name| name.into_string().expect("text"))
        .collect();
    names.sort();
    names
}

#[test]
fn layers_lie_over_each_other() {
    let base = Layer::new()
        .folder("usr/lib/")
        .link("lib", "usr/lib")
        .file("./usr/lib/one", "one")
        .file("data/old", "old")
        .file("data/kept", "kept")
        .file("opaque/lower", "lower")
        .file("becomes", "a file")
        .add(EntryType::Regular, "tool", "", 0o4755, "tool");
    let upper = Layer::new()
        .file("data/.wh.old", "")
        .file("opaque/mine/upper", "upper")
        .file("opaque/.wh..wh..opq", "")
        // Through a link of the lower layer.
        .file("lib/two", "two")
        .add(EntryType::Link, "hard", "usr/lib/one", 0o644, "")
        .folder("becomes")
        .file("data/kept", "changed");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&upper.done()).expect("packed");
    let last = Layer::new().file("last", "last").done();
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let zstd = ruzstd::encoding::compress_to_vec(&last[..], level);
    let layout = Layout::of(&[
        (PLAIN, base.done()),
        (&format!("{PLAIN}+gzip"), gzip.finish().expect("packed")),
        (&format!("{PLAIN}+zstd"), zstd),
    ]);
    assert!(is_layout(layout.0.path()));
    let (_outer, root, program) = layout.unpack();
    let program = program.expect("it is unpacked");
    assert_eq!(
        (&*program.user, &*program.working_dir, program.cmd.len()),
        ("1000:100", "/work", 0)
    );
    assert_eq!(program.env, ["A=b", "PATH=/x"]);
    assert_eq!(program.entrypoint, ["/bin/tool"]);

    assert_eq!(names(&root.join("data")), ["kept"]);
    assert_eq!(read(&root.join("data/kept")), "changed");
    assert_eq!(names(&root.join("opaque")), ["mine"]);
    assert_eq!(read(&root.join("opaque/mine/upper")), "upper");
    assert_eq!(names(&root.join("usr/lib")), ["one", "two"]);
    assert!(root.join("lib").is_symlink() && root.join("becomes").is_dir());
    let hard = fs::metadata(root.join("hard")).expect("metadata");
    assert_eq!((hard.nlink(), hard.mtime()), (2, 1000));
    assert_eq!(read(&root.join("last")), "last");
    let tool = fs::metadata(root.join("tool")).expect("metadata");
    assert_eq!(tool.permissions().mode() & 0o7777, 0o755);
}

#[test]
fn no_layer_reaches_outside() {
    let secret = |outer: &TempDir| outer.path().join("secret");
    for attack in [
        Layer::new().file("../secret", "changed"),
        Layer::new().file("folder/../../secret", "changed"),
        Layer::new().add(EntryType::Link, "hard", "../secret", 0o644, ""),
        Layer::new().file("data/.wh...", ""),
    ] {
        let layout = Layout::of(&[(PLAIN, attack.done())]);
        let outer = tempfile::tempdir().expect("a folder");
        fs::write(secret(&outer), "outside").expect("a file");
        let root = outer.path().join("root");
        fs::create_dir(&root).expect("a folder");
        let refused = unpack(layout.0.path(), &root);
        assert!(matches!(refused, Err(OciError::Outside(_))), "{refused:?}");
        assert_eq!(read(&secret(&outer)), "outside");
        assert_eq!(names(outer.path()), ["root", "secret"]);
    }
    // Links lead to places of the image, whatever they say.
    let (outer, root) = unpacked(vec![
        Layer::new()
            .link("up", "../../..")
            .link("away", "/tmp")
            .file("up/file", "inside")
            .folder("tmp")
            .file("away/file", "inside")
            .link("tmp/link", "/secret")
            .file("tmp/link", "a file in its place")
            .add(EntryType::Char, "null", "", 0o666, "")
            .add(EntryType::Fifo, "pipe", "", 0o666, ""),
    ]);
    assert_eq!(names(outer.path()), ["root"]);
    assert_eq!(names(&root), ["away", "file", "tmp", "up"]);
    assert_eq!(names(&root.join("tmp")), ["file", "link"]);
    assert!(!root.join("tmp/link").is_symlink());
    // A whiteout of a link to a folder removes the link alone.
    let outside = tempfile::tempdir().expect("a folder");
    fs::write(outside.path().join("file"), "").expect("a file");
    let (_outer, root) = unpacked(vec![
        Layer::new().file("folder/file", ""),
        Layer::new().file(".wh.folder", ""),
    ]);
    assert_eq!(names(&root), [""; 0]);
    symlink(outside.path(), root.join("link")).expect("a link");
    let layout = Layout::of(&[(PLAIN, Layer::new().file(".wh.link", "").done())]);
    unpack(layout.0.path(), &root).expect("it is unpacked");
    assert_eq!((names(&root).len(), names(outside.path()).len()), (0, 1));
}

#[test]
fn the_image_for_guests_is_chosen() {
    let layout = Layout::new();
    let with = |manifest: &str, os: &str, architecture: &str| {
        format!(r#"{manifest},"platform":{{"os":"{os}","architecture":"{architecture}"}}"#)
    };
    let layer = |text: &str| vec![(PLAIN, Layer::new().file("which", text).done())];
    let right = with(&layout.manifest(CONFIG, &layer("right")), "linux", "amd64");
    let other = with(&layout.manifest(CONFIG, &layer("other")), "linux", "arm64");
    let inner = layout.index(&[other.clone(), right.clone()]);
    let inner = layout.blob("application/vnd.oci.image.index.v1+json", inner.as_bytes());
    layout.finish(&layout.index(&[inner]));
    let (_outer, root, unpacked) = layout.unpack();
    unpacked.expect("it is unpacked");
    assert_eq!(read(&root.join("which")), "right");

    for (entries, count) in [(vec![other], 0), (vec![right.clone(), right], 2)] {
        layout.finish(&layout.index(&entries));
        let (_, _, refused) = layout.unpack();
        let refused = refused.expect_err("it is refused");
        assert!(matches!(refused, OciError::Count { count: found, .. } if found == count));
    }
    let arm = CONFIG.replace("amd64", "arm64");
    layout.finish(&layout.index(&[layout.manifest(&arm, &[])]));
    let (_, _, refused) = layout.unpack();
    let words = "the image is for linux/arm64, and guests are linux/amd64";
    assert_eq!(refused.expect_err("it is refused").to_string(), words);
}

#[test]
fn damaged_layouts_are_refused() {
    let layer = || Layer::new().file("file", "content").done();
    let place = |layout: &Layout, bytes: &[u8]| {
        let sum: String = Sha256::digest(bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        layout.0.path().join("blobs/sha256").join(sum)
    };
    let refused = |layout: &Layout| layout.unpack().2.expect_err("it is refused");

    let layout = Layout::of(&[(PLAIN, layer())]);
    let mut bytes = layer();
    bytes[600] ^= 1;
    fs::write(place(&layout, &layer()), &bytes).expect("changed");
    assert!(matches!(refused(&layout), OciError::Changed(_)));
    fs::remove_file(place(&layout, &layer())).expect("removed");
    assert!(matches!(refused(&layout), OciError::Read { .. }));

    let kinds = ["application/x-tar+xz", "", PLAIN];
    let layers = [layer(), layer(), vec![7; 2048]];
    for (kind, layer) in kinds.into_iter().zip(layers) {
        let layout = Layout::of(&[(kind, layer)]);
        let error = refused(&layout);
        assert!(
            matches!(error, OciError::Kind(_) | OciError::Layer { .. }),
            "{error:?}"
        );
    }
    let layout = Layout::of(&[]);
    for sum in ["sha256:../../../etc/passwd", "sha512:00", "", "sha256:AB"] {
        let entry = format!(r#""mediaType":"x","digest":"{sum}","size":1"#);
        layout.finish(&layout.index(&[entry]));
        assert!(matches!(refused(&layout), OciError::Sum(_)), "{sum}");
    }
    for text in ["", "[]", r#"{"manifests":7}"#, &"[".repeat(100_000)] {
        layout.finish(text);
        assert!(matches!(refused(&layout), OciError::Json { .. }));
    }
    let version = r#"{"imageLayoutVersion":"2.0.0"}"#;
    fs::write(layout.0.path().join("oci-layout"), version).expect("a file");
    assert!(matches!(refused(&layout), OciError::Version { .. }));
    // A header that would fill memory.
    let long = "x".repeat(2 << 20);
    let attack = Layer::new().add(EntryType::XHeader, "header", "", 0o644, &long);
    let layout = Layout::of(&[(PLAIN, attack.done())]);
    assert!(matches!(refused(&layout), OciError::Layer { .. }));
}

#[test]
fn a_pipe_in_a_layout_holds_nobody_up() {
    let layer = || Layer::new().file("file", "content").done();
    for name in ["index.json", "blob"] {
        let layout = Layout::of(&[(PLAIN, layer())]);
        let sum: String = Sha256::digest(layer())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let place = match name {
            "blob" => layout.0.path().join("blobs/sha256").join(sum),
            _ => layout.0.path().join(name),
        };
        fs::remove_file(&place).expect("removed");
        let pipe = rustix::fs::mknodat(
            rustix::fs::CWD,
            &place,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        );
        pipe.expect("a pipe");
        let refused = layout.unpack().2.expect_err("it is refused");
        assert!(matches!(refused, OciError::Read { .. }), "{refused:?}");
    }
}

#[test]
fn paths_with_too_many_parts_are_refused() {
    let unpack = |parts: usize| {
        let path = vec!["n"; parts].join("/");
        let layer = Layer::new()
            .add(EntryType::GNULongName, "././@LongLink", "", 0o644, &path)
            .file("short", "content");
        Layout::of(&[(PLAIN, layer.done())]).unpack()
    };
    let (_outer, root, unpacked) = unpack(256);
    unpacked.expect("it is unpacked");
    assert_eq!(read(&root.join(vec!["n"; 256].join("/"))), "content");
    for parts in [257, 2047] {
        let (_outer, root, refused) = unpack(parts);
        assert!(matches!(refused, Err(OciError::Depth(256))), "{refused:?}");
        assert_eq!(names(&root), [""; 0]);
    }
}

/// Each folder is made by way of a link to the one before.
#[test]
fn an_image_that_nests_by_links_is_removed_whole() {
    let deep = vec!["n"; 40].join("/");
    let mut layer = Layer::new().folder(&deep).link("0", &deep);
    for link in 0..8 {
        layer = layer.folder(&format!("{link}/{deep}"));
        layer = layer.link(&(link + 1).to_string(), &format!("{link}/{deep}"));
    }
    let (outer, root) = unpacked(vec![layer]);
    assert_eq!(names(&root).len(), 10);
    remove_unpacked(&root).expect("it is removed");
    assert_eq!(names(outer.path()), [""; 0]);
}
