//! Replays the committed inputs of each fuzz target, and checks that no target is left out.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use wormhole_fuzz as fuzz;
use wormhole_lock::Mutex;

/// Declares a test for each target, and the table of all.
macro_rules! targets {
    ($($name:ident)*) => {
        const TARGETS: &[&str] = &[$(stringify!($name)),*];

        $(
            #[test]
            fn $name() {
                replay(stringify!($name), fuzz::$name::run);
            }
        )*
    };
}

targets! {
    api_decode
    control_decode
    cuda_image
    driver_file
    fatbin
    fuse_changes
    fuse_requests
    pair_decode
    passthrough
    ptx
    ptx_run
    report
    ring_consumer
    serial
    snapshot
    supervisor
    virtio_pci
    virtio_queues
}

/// Held while a test has files open: some targets count the open descriptors of this process.
static ALONE: Mutex<()> = Mutex::new(());

/// Names an input when it panics.
struct Named<'a>(&'a Path, &'a str);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input is {}, {}", self.0.display(), self.1);
        }
    }
}

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a target on each input of its corpus, and on two that differ from it.
fn replay(target: &str, run: fn(&[u8])) {
    let _alone = ALONE.lock();
    let paths = files(&folder().join("corpus").join(target));
    assert!(!paths.is_empty(), "{target} has no input");
    for path in paths {
        let whole = fs::read(&path).unwrap();
        let half = whole[..whole.len() / 2].to_vec();
        let mut changed = whole.clone();
        if let Some(byte) = changed.get_mut(half.len()) {
            *byte = !*byte;
        }
        for (input, what) in [
            (whole, "whole"),
            (half, "its first half"),
            (changed, "with the byte in its middle inverted"),
        ] {
            let _named = Named(&path, what);
            run(&input);
        }
    }
}

/// Returns the files in a folder and in those below it, in order.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let below = |path: PathBuf| match path.is_dir() {
        true => files(&path),
        false => vec![path],
    };
    paths.into_iter().flat_map(below).collect()
}

#[test]
fn each_target_has_a_test_a_program_and_a_corpus() {
    let _alone = ALONE.lock();
    let names = |part: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(folder().join(part)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let stems = paths.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned());
        stems.collect()
    };
    let mut modules = names("src");
    modules.remove("lib");
    let manifest = fs::read_to_string(folder().join("Cargo.toml")).unwrap();
    let built = |line: &str| {
        let path = line.strip_prefix("path = \"fuzz_targets/")?;
        Some(path.strip_suffix(".rs\"")?.to_owned())
    };
    let targets: BTreeSet<String> = TARGETS.iter().map(|&name| name.to_owned()).collect();
    assert_eq!(modules, targets, "modules");
    assert_eq!(names("fuzz_targets"), targets, "programs");
    assert_eq!(
        manifest.lines().filter_map(built).collect::<BTreeSet<_>>(),
        targets,
        "programs of the manifest"
    );
    assert_eq!(names("corpus"), targets, "corpora");
}
