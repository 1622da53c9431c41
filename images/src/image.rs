//! Builds images and opens them: a kernel, an archive of its modules, and its release.
//!
//! `FOLDER/guest-6.1/{vmlinuz,modules.cpio,release,SHA256SUMS}`, and in an image with a driver `driver` and `driver.cpio`. A
//! folder with that name is complete: it is built under a temporary name and renamed. SHA256SUMS holds the sums of the other files as they were built, in the format of
//! sha256sum(1). They are verified each time before the image is used.

mod driver;

pub use driver::{Listed, ListedDriver};

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use tempfile::TempDir;
use wormhole_init::MODULE_LIST;

use crate::cpio::Archive;
use crate::debian;
use crate::disk::remove;
use crate::driver::{Chosen, Driver, DriverSource, check_folder, check_machine};
use crate::error::{ImageError, io};
use crate::kernel::Kernel;
use crate::modules::Modules;
use crate::sums::{self, Damage};

/// Kernel command line of every image. The kernel's tests of its own ciphers take more than a second of a boot under
/// emulation, and show nothing of a virtual machine.
pub const COMMAND_LINE: &str =
    "console=ttyS0 quiet panic=-1 reboot=k tsc=reliable cryptomgr.notests";

/// Files of an image.
const KERNEL: &str = "vmlinuz";
const MODULES: &str = "modules.cpio";
const RELEASE: &str = "release";
const FILES: [&str; 3] = [KERNEL, MODULES, RELEASE];
/// Names of images.
const GUEST: &str = "guest";
const BACKEND: &str = "backend";
const EMULATED_HOST: &str = "emulated-host";
/// Start of the names of folders in which images are made.
const FRESH: &str = "fresh-";
/// Beside them: names and hashes of all that the image was built of. An image of an older Wormhole has none.
const RECIPE: &str = "recipe";

/// Name and parameters of a module to load.
pub(crate) type Wanted = (&'static str, &'static str);

/// Drivers of a guest's virtio devices: disks, networks, files of the host, vsock, entropy and balloon.
pub(crate) const VIRTIO: [Wanted; 7] = [
    ("virtio_pci", ""),
    ("virtio_blk", ""),
    ("virtio_net", ""),
    ("virtiofs", ""),
    ("vmw_vsock_virtio_transport", ""),
    ("virtio_rng", ""),
    ("virtio_balloon", ""),
];

/// File system of a guest that writes beside the host's files.
pub(crate) const OVERLAY: [Wanted; 1] = [("overlay", "")];

/// Drivers and file system of a guest's memory for shared files.
const FILE_MEMORY: [Wanted; 3] = [("nd_e820", ""), ("nd_pmem", ""), ("ext4", "")];

/// Drivers of a guest's window.
const WINDOW_6_1: [Wanted; 2] = [("dax_hmem", ""), ("device_dax", "")];

/// Drivers of the window on Linux 6.12, where its region must stay idle until it is bound.
const WINDOW_6_12: [Wanted; 2] = [("dax_hmem", "region_idle=1"), ("device_dax", "")];

/// Drivers of a backend VM's virtio devices: vsock, entropy and balloon. It has neither disks nor files of the host.
const BACKEND_VIRTIO: [Wanted; 4] = [
    ("virtio_pci", ""),
    ("vmw_vsock_virtio_transport", ""),
    ("virtio_rng", ""),
    ("virtio_balloon", ""),
];

/// Drivers of the emulated host: disks, networks and the taps that it bridges with them, files of the real host, virtio
/// ports, KVM, then VFIO.
const HOST_MODULES: [Wanted; 11] = [
    ("virtio_pci", ""),
    ("virtio_blk", ""),
    ("virtio_net", ""),
    ("tun", ""),
    ("bridge", ""),
    ("virtiofs", ""),
    ("virtio_console", ""),
    ("irqbypass", ""),
    ("kvm_amd", ""),
    ("vfio_iommu_type1", ""),
    ("vfio_pci", ""),
];

/// Content of an image beside its kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content<'a> {
    /// Modules in load order. Their dependencies are added.
    pub modules: &'a [Wanted],
    /// Path and data of an additional file.
    pub file: Option<(&'a str, &'a [u8])>,
    /// A driver of NVIDIA's.
    pub driver: Option<&'a Chosen>,
}

impl<'a> Content<'a> {
    fn modules(modules: &'a [Wanted]) -> Self {
        Self {
            modules,
            file: None,
            driver: None,
        }
    }

    /// A text that differs from those of other contents.
    fn recipe(&self) -> String {
        let modules = self
            .modules
            .iter()
            .map(|(name, parameters)| format!("module {name} {parameters}\n"));
        let file = self
            .file
            .map(|(path, data)| format!("file {path} {}\n", sums::of(data)));
        let driver = self.driver.map(Chosen::recipe);
        modules.chain(file).chain(driver).collect()
    }

    /// Returns whether an image of this recipe has the content. It may have a driver that the content does not name.
    fn is_of(&self, recipe: &str) -> bool {
        let lines = recipe.split_inclusive('\n');
        let plain: String = lines
            .filter(|line| !line.starts_with(driver::LINE))
            .collect();
        match self.driver {
            Some(_) => recipe == self.recipe(),
            None => plain == self.recipe(),
        }
    }
}

/// A kernel and its modules, bootable with an overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Path of the kernel, a bzImage.
    pub kernel: PathBuf,
    /// Path of the archive of modules, uncompressed.
    pub modules: PathBuf,
    /// Full release of the kernel, such as `6.1.0-50-cloud-amd64`.
    pub release: String,
    /// Driver of GPUs, if the image has one.
    pub driver: Option<Driver>,
}

/// Options of building an image.
#[derive(Clone, Copy)]
pub struct BuildOptions<'a> {
    /// Folder of images.
    pub folder: &'a Path,
    pub kernel: Kernel,
    /// Builds the image even if it exists.
    pub rebuild: bool,
    /// Callback that receives progress messages, one sentence each.
    pub progress: &'a dyn Fn(&str),
}

impl std::fmt::Debug for BuildOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BuildOptions")
            .field("folder", &self.folder)
            .field("kernel", &self.kernel)
            .field("rebuild", &self.rebuild)
            .finish_non_exhaustive()
    }
}

/// Folder of root's images. Services that systemd starts have no HOME.
pub const OF_ROOT: &str = "/var/lib/wormhole/images";

/// Returns the folder of images: `$WORMHOLE_IMAGES`, else `installed` if that folder exists, else [`OF_ROOT`] for root and
/// `wormhole/images` in the data folder of another user. `None` if that user's HOME is not set either.
pub fn default_folder(installed: &Path) -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    folder_of(installed, is_root, |name| std::env::var_os(name))
}

/// Returns the folder of images as [`default_folder`] does, with these variables.
fn folder_of(
    installed: &Path,
    is_root: bool,
    variables: impl Fn(&str) -> Option<OsString>,
) -> Option<PathBuf> {
    let variable = |name| {
        variables(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("WORMHOLE_IMAGES")
        .or_else(|| installed.is_dir().then(|| installed.to_path_buf()))
        .or_else(|| is_root.then(|| OF_ROOT.into()))
        .or_else(|| {
            variable("XDG_DATA_HOME")
                .or_else(|| variable("HOME").map(|home| home.join(".local/share")))
                .map(|data| data.join("wormhole/images"))
        })
}

/// Builds the guest's image unless it exists.
pub fn build_guest(options: &BuildOptions<'_>) -> Result<Image, ImageError> {
    let modules = [
        &VIRTIO[..],
        &OVERLAY,
        &FILE_MEMORY,
        window_drivers(options.kernel),
    ]
    .concat();
    build(GUEST, &Content::modules(&modules), options)
}

/// Builds the image of backend VMs unless it exists.
pub fn build_backend(options: &BuildOptions<'_>) -> Result<Image, ImageError> {
    let modules = backend_modules(options.kernel);
    build(BACKEND, &Content::modules(&modules), options)
}

/// Builds the image of backend VMs with a driver of NVIDIA's, unless it exists with this driver.
pub fn build_backend_with(
    driver: &DriverSource,
    options: &BuildOptions<'_>,
) -> Result<Image, ImageError> {
    let modules = backend_modules(options.kernel);
    let content = Content {
        driver: Some(&driver.choose()?),
        ..Content::modules(&modules)
    };
    build(BACKEND, &content, options)
}

fn backend_modules(kernel: Kernel) -> Vec<Wanted> {
    [&BACKEND_VIRTIO[..], window_drivers(kernel)].concat()
}

fn window_drivers(kernel: Kernel) -> &'static [Wanted] {
    match kernel {
        Kernel::V6_1 => &WINDOW_6_1,
        Kernel::V6_12 => &WINDOW_6_12,
    }
}

/// Builds the emulated host's image unless it exists.
pub fn build_emulated_host(options: &BuildOptions<'_>) -> Result<Image, ImageError> {
    build(EMULATED_HOST, &Content::modules(&HOST_MODULES), options)
}

impl Image {
    /// Opens the guest's image, which must have been built.
    pub fn guest(folder: &Path, kernel: Kernel) -> Result<Self, ImageError> {
        Self::open(GUEST, folder, kernel)
    }

    /// Opens the image of backend VMs, which must have been built.
    pub fn backend(folder: &Path, kernel: Kernel) -> Result<Self, ImageError> {
        Self::open(BACKEND, folder, kernel)
    }

    /// Opens the emulated host's image, which must have been built.
    pub fn emulated_host(folder: &Path, kernel: Kernel) -> Result<Self, ImageError> {
        Self::open(EMULATED_HOST, folder, kernel)
    }

    fn open(what: &'static str, folder: &Path, kernel: Kernel) -> Result<Self, ImageError> {
        let place = place(what, folder, kernel);
        let path = place.join(RELEASE);
        let release = fs::read_to_string(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => ImageError::NotBuilt {
                what,
                kernel,
                folder: folder.to_owned(),
            },
            _ => io("read", &path)(source),
        })?;
        let damaged = |damage| ImageError::Damaged {
            what,
            kernel,
            place: place.clone(),
            damage,
            option: if driver::is_there(&place) {
                " --driver FILE"
            } else {
                ""
            },
        };
        if let Some(damage) = sums::compare(&place, &FILES)? {
            return Err(damaged(damage));
        }
        let driver = driver::described(&place)?;
        let driver =
            driver.map(|driver| driver.ok_or_else(|| damaged(Damage::Changed(driver::FILE))));
        Ok(Self {
            kernel: place.join(KERNEL),
            modules: place.join(MODULES),
            release,
            driver: driver.transpose()?,
        })
    }

    /// Adds the image to an archive such that it is found below `folder` as it was here.
    pub(crate) fn pack(&self, archive: &mut Archive, folder: &str) -> Result<(), ImageError> {
        let own = self.kernel.parent().and_then(Path::file_name);
        let own = own.ok_or_else(|| ImageError::Path(self.kernel.clone()))?;
        let place = Path::new(folder).join(own).display().to_string();
        for path in FILES.iter().chain([&sums::FILE]) {
            let source = self.kernel.with_file_name(path);
            let data = fs::read(&source).map_err(io("read", &source))?;
            archive.file(format!("{place}/{path}"), 0o644, &data)?;
        }
        Ok(())
    }
}

fn place(what: &str, folder: &Path, kernel: Kernel) -> PathBuf {
    folder.join(format!("{what}-{kernel}"))
}

/// Builds an image unless it exists.
pub(crate) fn build(
    what: &'static str,
    content: &Content<'_>,
    options: &BuildOptions<'_>,
) -> Result<Image, ImageError> {
    let &BuildOptions {
        folder,
        kernel,
        rebuild,
        progress,
    } = options;
    let current = |progress: &dyn Fn(&str)| -> Result<Option<Image>, ImageError> {
        if rebuild {
            return Ok(None);
        }
        let current = |progress| current(what, content, folder, kernel, progress);
        let place = place(what, folder, kernel);
        if content.driver.is_none() && driver::is_there(&place) {
            return current(&|_| ())
                .map_or_else(|| Err(driver::loss(place)), |image| Ok(Some(image)));
        }
        Ok(current(progress))
    };
    if let Some(image) = current(progress)? {
        return Ok(image);
    }
    if content.driver.is_some() {
        check_machine(rustix::process::geteuid().is_root())?;
    }
    let _lock = lock(folder, progress)?;
    // The previous holder of the lock may have built the image.
    if let Some(image) = current(&|_| ())? {
        return Ok(image);
    }
    remove_leftovers(folder)?;
    if content.driver.is_some() {
        check_folder(folder)?;
    }

    progress(&format!(
        "fetching Debian's kernel {kernel} for the {what} image"
    ));
    let package = debian::Archive::update(folder, kernel)?.fetch(kernel)?;
    progress(&format!("packing the {what} image of {}", package.release));
    let fresh = fresh_in(folder)?;
    let root = package.root.path();
    copy(
        &root
            .join("boot")
            .join(format!("vmlinuz-{}", package.release)),
        &fresh.path().join(KERNEL),
    )?;
    // Debian 13's packages have `usr/lib`.
    let folders = ["usr/lib/modules", "lib/modules"].map(|folder| root.join(folder));
    let folder_of_modules = folders.iter().find(|path| path.is_dir());
    let folder_of_modules = folder_of_modules
        .unwrap_or(&folders[0])
        .join(&package.release);
    let modules = Modules::in_folder(&folder_of_modules)?;
    let mut archive = Archive::new();
    if let Some((path, data)) = content.file {
        archive.file(path, 0o644, data)?;
    }
    let mut list = String::new();
    for (path, parameters) in add_modules(&mut archive, &modules, content.modules)? {
        list.push_str(format!("{path} {parameters}").trim_end());
        list.push('\n');
    }
    archive.file(MODULE_LIST.trim_start_matches('/'), 0o644, list.as_bytes())?;
    write(&fresh.path().join(MODULES), &archive.finish())?;
    write(&fresh.path().join(RELEASE), package.release.as_bytes())?;
    write(&fresh.path().join(RECIPE), content.recipe().as_bytes())?;
    let mut files = FILES.to_vec();
    if let Some(chosen) = content.driver {
        let surroundings = (
            kernel,
            package.release.as_str(),
            folder_of_modules.as_path(),
        );
        driver::add(chosen, surroundings, fresh.path(), options)?;
        files.extend(driver::FILES);
    }
    sums::write(fresh.path(), &files)?;

    put(fresh, &place(what, folder, kernel), RenameFlags::EXCHANGE)?;
    Image::open(what, folder, kernel)
}

/// Adds modules, and those that they need, to an archive. Returns their paths in the machine and their parameters, in load order.
pub(crate) fn add_modules(
    archive: &mut Archive,
    modules: &Modules,
    wanted: &[Wanted],
) -> Result<Vec<(String, &'static str)>, ImageError> {
    let names: Vec<&str> = wanted.iter().map(|&(name, _)| name).collect();
    let mut added = Vec::new();
    for module in modules.in_order(&names)? {
        let path = format!("usr/lib/modules/wormhole/{}.ko", module.name);
        archive.file(&path, 0o644, &module.data)?;
        let parameters = wanted
            .iter()
            .find_map(|&(name, parameters)| (name == module.name).then_some(parameters));
        added.push((format!("/{path}"), parameters.unwrap_or_default()));
    }
    Ok(added)
}

/// Makes an empty folder beside the images.
fn fresh_in(folder: &Path) -> Result<TempDir, ImageError> {
    tempfile::Builder::new()
        .prefix(FRESH)
        .tempdir_in(folder)
        .map_err(io("make a folder in", folder))
}

/// Puts a whole image into its place, and removes the one that was there. With `exchange` one of both is there at each time,
/// so that a build that is killed loses none.
fn put(fresh: TempDir, place: &Path, exchange: RenameFlags) -> Result<(), ImageError> {
    let rename = || fs::rename(fresh.path(), place).map_err(io("place", place));
    let old = match renameat_with(CWD, fresh.path(), CWD, place, exchange) {
        // They have changed their names.
        Ok(()) => fresh,
        Err(Errno::NOENT) => return rename(),
        // Not every file system can exchange two names.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            let aside = fresh_in(place.parent().unwrap_or(place))?;
            let there = aside.path().join("image");
            fs::rename(place, there).map_err(io("put aside", place))?;
            rename()?;
            aside
        }
        Err(error) => return Err(io("place", place)(error.into())),
    };
    let path = old.path().to_owned();
    old.close().map_err(io("remove", &path))
}

/// Removes what builds that were interrupted have left in a folder of images, which must be locked.
fn remove_leftovers(folder: &Path) -> Result<(), ImageError> {
    for entry in fs::read_dir(folder).map_err(io("list", folder))? {
        let entry = entry.map_err(io("list", folder))?;
        let metadata = entry.metadata().map_err(io("look at", folder))?;
        if is_leftover(&entry.file_name().to_string_lossy(), &metadata) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether an entry of a folder of images is one that an interrupted build of this user has left.
fn is_leftover(name: &str, metadata: &fs::Metadata) -> bool {
    // As tempfile names folders.
    let is_fresh = name.strip_prefix(FRESH).is_some_and(|rest| {
        rest.len() == 6 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric())
    });
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    metadata.is_dir() && is_own && (is_fresh || name == driver::SCRATCH)
}

/// The image, unless it is missing, damaged, of another recipe, or of another Debian's kernel.
fn current(
    what: &'static str,
    content: &Content<'_>,
    folder: &Path,
    kernel: Kernel,
    progress: &dyn Fn(&str),
) -> Option<Image> {
    let image = Image::open(what, folder, kernel).ok()?;
    if !kernel.is_original(&image.release) {
        progress(&format!(
            "the {what} image has kernel {}, which is not that of {}: building it again",
            image.release,
            kernel.suite()
        ));
        return None;
    }
    match fs::read_to_string(place(what, folder, kernel).join(RECIPE)) {
        Ok(recipe) if content.is_of(&recipe) => Some(image),
        _ if content.driver.is_some() => {
            let driver = image.driver.map(|driver| driver.version);
            progress(&format!(
                "the {what} image of kernel {kernel} has {}: building it again",
                driver.map_or("no driver".to_owned(), |version| format!(
                    "driver {version}, which was built of another file or for other modules"
                ))
            ));
            None
        }
        Ok(_) => {
            progress(&format!(
                "the {what} image of kernel {kernel} was built by another version of Wormhole, which packed other \
                 modules: building it again"
            ));
            None
        }
        Err(_) => {
            progress(&format!(
                "the {what} image of kernel {kernel} is there, but does not say which modules it was built with: \
                 --rebuild builds it again"
            ));
            Some(image)
        }
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), ImageError> {
    fs::copy(from, to).map(drop).map_err(io("copy", from))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    fs::write(path, bytes).map_err(io("write", path))
}

/// Locks a folder of images until the file is dropped, and says so if it has to wait. Makes the folder if it is missing.
pub(crate) fn lock(folder: &Path, progress: &dyn Fn(&str)) -> Result<File, ImageError> {
    fs::create_dir_all(folder).map_err(io("make", folder))?;
    let path = folder.join("lock");
    // A new lock is this user's alone, since each user who can open it can hold it. An existing one has the mode that
    // its owner gave it.
    let mut private = File::options();
    private.write(true).create(true).truncate(false).mode(0o600);
    let lock = match private.open(&path) {
        // No image is built there, but the folder may be written elsewhere.
        Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => File::open(&path),
        opened => opened,
    };
    let lock = lock.map_err(io("open", &path))?;
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        progress(&format!(
            "waiting for another build of images in {}",
            folder.display()
        ));
    }
    lock.lock().map_err(io("lock", &path))?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn an_image_that_is_not_built_names_the_command_that_builds_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Image::guest(folder.path(), Kernel::V6_12).expect_err("nothing was built");
        assert!(
            error
                .to_string()
                .contains("wormhole image build guest --kernel 6.12"),
            "{error}"
        );
    }

    #[test]
    fn images_are_looked_for_where_the_user_says_then_in_the_installation_then_in_a_folder_of_the_user()
     {
        let prefix = tempfile::tempdir().expect("a folder");
        let installed = prefix.path().join("share/wormhole/images");
        let home = |name: &str| (name == "HOME").then(|| OsString::from("/users/one"));
        let says = |name: &str| match name {
            "WORMHOLE_IMAGES" => Some(OsString::from("/elsewhere")),
            _ => home(name),
        };
        assert_eq!(
            folder_of(&installed, false, home).as_deref(),
            Some(Path::new("/users/one/.local/share/wormhole/images"))
        );
        assert_eq!(folder_of(&installed, false, |_| None), None);
        assert_eq!(
            folder_of(&installed, true, |_| None).as_deref(),
            Some(Path::new(OF_ROOT))
        );
        fs::create_dir_all(&installed).expect("a folder");
        assert_eq!(folder_of(&installed, true, home).as_ref(), Some(&installed));
        assert_eq!(
            folder_of(&installed, true, says).as_deref(),
            Some(Path::new("/elsewhere"))
        );
    }

    #[test]
    fn a_packed_image_is_found_where_it_was_packed_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("guest-6.1");
        fs::create_dir(&place).expect("a folder");
        for (name, text) in [
            ("vmlinuz", "kernel"),
            ("modules.cpio", "modules"),
            ("release", "6.1.0-1"),
        ] {
            fs::write(place.join(name), text).expect("a file");
        }
        sums::write(&place, &FILES).expect("the files are there");
        let image = Image::guest(folder.path(), Kernel::V6_1).expect("it is there");
        assert_eq!(image.release, "6.1.0-1");
        let mut archive = Archive::new();
        image
            .pack(&mut archive, "var/images")
            .expect("it is packed");
        for name in ["vmlinuz", "modules.cpio", "release", "SHA256SUMS"] {
            assert!(archive.contains(format!("var/images/guest-6.1/{name}")));
        }
    }

    #[test]
    fn a_damaged_image_names_the_file_and_the_command_that_builds_it_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("guest-6.1");
        fs::create_dir(&place).expect("a folder");
        for name in FILES {
            fs::write(place.join(name), "as it was built").expect("a file");
        }
        let refused = |words: &str| {
            let error = Image::guest(folder.path(), Kernel::V6_1).expect_err(words);
            let said = error.to_string();
            assert!(said.contains(words), "{said}");
            assert!(
                said.contains("wormhole image build guest --kernel 6.1 --rebuild"),
                "{said}"
            );
        };
        refused("has no SHA256SUMS");
        sums::write(&place, &FILES).expect("the files are there");
        Image::guest(folder.path(), Kernel::V6_1).expect("it is whole");
        for name in FILES {
            fs::write(place.join(name), "as it was bui1t").expect("a file");
            refused(&format!("{name} is not as it was built"));
            fs::write(place.join(name), "as it was built").expect("a file");
        }
        fs::remove_file(place.join(KERNEL)).expect("it was there");
        refused("vmlinuz is missing");
        fs::write(place.join(sums::FILE), "").expect("a file");
        refused("vmlinuz is missing");
    }

    #[test]
    fn a_build_that_waits_for_another_one_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let first = lock(folder, &|line| panic!("{line}")).expect("it is free");
        let (said, lines) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let say = |line: &str| said.send(line.to_owned()).expect("it is read");
                lock(folder, &say).expect("it is free again");
            });
            let line = lines.recv().expect("a line");
            assert!(line.starts_with("waiting for another build"), "{line}");
            drop(first);
        });
    }

    #[test]
    fn an_image_is_there_at_each_time_while_another_one_takes_its_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let place = folder.join("backend-6.1");
        let put_one = |number: usize, exchange| {
            let fresh = fresh_in(folder).expect("a folder");
            fs::write(fresh.path().join(RELEASE), number.to_string()).expect("room");
            for file in 0..50 {
                fs::write(fresh.path().join(file.to_string()), "").expect("room");
            }
            put(fresh, &place, exchange).expect("it is ours");
            let found = fs::read_to_string(place.join(RELEASE)).expect("it is there");
            assert_eq!(found, number.to_string());
        };
        put_one(0, RenameFlags::EXCHANGE);
        let (end, ended) = mpsc::channel::<()>();
        let is_over = || ended.try_recv() == Err(mpsc::TryRecvError::Disconnected);
        thread::scope(|scope| {
            scope.spawn(|| {
                (1..100).for_each(|number| put_one(number, RenameFlags::EXCHANGE));
                drop(end);
            });
            while !is_over() {
                assert!(place.join(RELEASE).exists(), "no image was there");
            }
        });
        // As on a file system that cannot exchange names.
        let none = RenameFlags::EXCHANGE | RenameFlags::NOREPLACE;
        put_one(100, none);
        let left = fs::read_dir(folder).expect("it is there").count();
        assert_eq!(left, 1);
    }

    #[test]
    fn leftovers_of_interrupted_builds_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        for name in [
            "fresh-aB1cD2",
            "fresh-notes",
            "unfinished-driver",
            "guest-6.1",
            "guest-bookworm",
            "apt",
        ] {
            fs::create_dir_all(folder.join(name).join("image")).expect("a folder");
            fs::write(folder.join(name).join("image/file"), name).expect("room");
        }
        for name in ["lock", "fresh-aB1cD3"] {
            fs::write(folder.join(name), "").expect("room");
        }
        remove_leftovers(folder).expect("they are ours");
        let entries = fs::read_dir(folder).expect("it is there");
        let mut left: Vec<_> = entries
            .map(|entry| entry.expect("one").file_name())
            .collect();
        left.sort();
        let others = [
            "apt",
            "fresh-aB1cD3",
            "fresh-notes",
            "guest-6.1",
            "guest-bookworm",
            "lock",
        ];
        assert_eq!(left, others);
    }

    #[test]
    fn an_image_of_another_recipe_is_built_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("guest-6.1");
        fs::create_dir(&place).expect("a folder");
        for name in FILES {
            fs::write(place.join(name), name).expect("it is ours");
        }
        sums::write(&place, &FILES).expect("sums");
        let (old, new) = (&VIRTIO[..3], &VIRTIO[..]);
        let look = |modules| {
            let said = std::cell::RefCell::new(String::new());
            let content = Content::modules(modules);
            let found = current("guest", &content, folder.path(), Kernel::V6_1, &|line| {
                said.borrow_mut().push_str(line);
            });
            (found.is_some(), said.into_inner())
        };
        let (is_kept, said) = look(new);
        assert!(is_kept && said.contains("--rebuild"), "{said}");
        let recipe = Content::modules(old).recipe();
        fs::write(place.join(RECIPE), recipe).expect("it is ours");
        assert_eq!(look(old), (true, String::new()));
        let (is_kept, said) = look(new);
        assert!(!is_kept && said.contains("other modules"), "{said}");
        // A kernel of the same series from another Debian counts as well.
        let of_6_12 = place.with_file_name("guest-6.12");
        fs::rename(&place, &of_6_12).expect("it is ours");
        let said = std::cell::RefCell::new(String::new());
        let content = Content::modules(old);
        let look = || {
            current("guest", &content, folder.path(), Kernel::V6_12, &|line| {
                said.borrow_mut().push_str(line);
            })
            .is_some()
        };
        assert!(!look());
        assert!(said.borrow().contains("not that of trixie"), "{said:?}");
        fs::write(of_6_12.join(RELEASE), "6.12.1+deb13-cloud-amd64").expect("it is ours");
        sums::write(&of_6_12, &FILES).expect("sums");
        assert!(look(), "{said:?}");
        // A driver is kept unless another one is wanted.
        let plain = Content::modules(old);
        let with_driver = Content {
            driver: Some(&Chosen::Debian),
            ..plain
        };
        assert!(with_driver.is_of(&with_driver.recipe()) && plain.is_of(&with_driver.recipe()));
        assert!(plain.is_of(&plain.recipe()) && !with_driver.is_of(&plain.recipe()));
        assert!(!with_driver.is_of(&(plain.recipe() + "driver 0123\n")));
        assert!(!plain.is_of(&(plain.recipe() + "module one\ndriver debian\n")));
        // A file counts as well.
        let with = |data| Content {
            file: Some(("table", data)),
            ..Content::modules(old)
        };
        assert_ne!(with(b"1").recipe(), with(b"2").recipe());
        assert_ne!(with(b"1").recipe(), Content::modules(old).recipe());
    }
}
