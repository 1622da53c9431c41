//! Boots backend VMs whose image has a driver that their kernel cannot load.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};
use wormhole_images::{Driver, Image, Kernel};

use crate::emulated::script_with;
use crate::harness::{beside_other_guests, images};

/// Files of an image with a driver, in the order of their sums.
const FILES: [&str; 5] = [
    "vmlinuz",
    "modules.cpio",
    "release",
    "driver",
    "driver.cpio",
];

/// Starts a backend VM with a GPU's device for each folder of images, as `backend start` would with a GPU.
const SCRIPT: &str = r#"
command=$1
shift
for images; do
    "$command" backend-vm --listen /run/backend --images "$images" --device cuda:0 --slots 1 --slot-size 8M && exit 1
    echo "status $?"
done
"#;

/// Returns an entry of a cpio archive, a file or with mode 040755 a folder.
fn entry(name: &str, mode: usize, data: &[u8]) -> Vec<u8> {
    let fields = [1, mode, 0, 0, 1, 0, data.len(), 0, 0, 0, 0];
    let mut bytes = b"070701".to_vec();
    for field in fields.into_iter().chain([name.len() + 1, 0]) {
        bytes.extend(format!("{field:08x}").bytes());
    }
    bytes.extend(name.bytes().chain([0]));
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Makes an image with a driver for the kernel `release`, whose module is no module.
fn make(folder: &Path, release: &str) {
    let image = Image::backend(&images(), Kernel::V6_1).expect("an image");
    let place = folder.join("backend-6.1");
    fs::create_dir_all(&place).expect("a folder");
    for name in &FILES[..3] {
        let source = image.kernel.with_file_name(name);
        fs::copy(source, place.join(name)).expect("room");
    }
    let driver = Driver {
        version: "580.95.05".to_owned(),
        origin: "a test".to_owned(),
        release: release.to_owned(),
        modules: vec![("/usr/nvidia.ko".into(), String::new())],
        libraries: Vec::new(),
    };
    let text = driver.to_string();
    let mut archive: Vec<u8> = ["etc", "etc/wormhole", "usr"]
        .map(|name| entry(name, 0o40755, b""))
        .concat();
    archive.extend(entry("etc/wormhole/driver", 0o100644, text.as_bytes()));
    archive.extend(entry("usr/nvidia.ko", 0o100644, b"no module"));
    archive.extend(entry("TRAILER!!!", 0, b""));
    archive.resize(archive.len().next_multiple_of(512), 0);
    fs::write(place.join("driver"), text).expect("room");
    fs::write(place.join("driver.cpio"), archive).expect("room");
    let line = |name: &&str| {
        let sum = Sha256::digest(fs::read(place.join(name)).expect("a file"));
        let digits: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{digits}  {name}\n")
    };
    let sums: String = FILES.iter().map(line).collect();
    fs::write(place.join("SHA256SUMS"), sums).expect("room");
}

#[test]
fn a_driver_that_the_kernel_of_a_backend_vm_cannot_load_is_named_in_its_log() {
    let _beside = beside_other_guests();
    let folder = tempfile::tempdir().expect("a folder");
    let image = Image::backend(&images(), Kernel::V6_1).expect("an image");
    let (other, own) = (folder.path().join("other"), folder.path().join("own"));
    make(&other, "6.1.0-1-cloud-amd64");
    make(&own, &image.release);
    let folders: [OsString; 2] = [&other, &own].map(Into::into);
    let limit = Duration::from_secs(300);
    let said = script_with(&[], SCRIPT, &folders, &[other, own], &[], limit);
    let mismatch = format!(
        "driver 580.95.05 was built for kernel 6.1.0-1-cloud-amd64, and this VM has {}",
        image.release
    );
    assert!(said.contains(&mismatch), "{said}");
    let refused = "the kernel does not take the driver's module /usr/nvidia.ko: Exec format error";
    assert!(said.contains(refused), "{said}");
    assert_eq!(said.matches("status 2\n").count(), 2, "{said}");
}
