//! The driver of an image of backend VMs: its files, which are compared with their sums only where a VM has a GPU.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{BACKEND, BuildOptions, EMULATED_HOST, GUEST, Image, RELEASE, place, write};
use crate::disk::in_fresh;
use crate::driver::{self, Chosen, Driver, Surroundings};
use crate::error::{ImageError, io};
use crate::kernel::Kernel;
use crate::sums;

/// Files that an image with a driver has beside the others: the description of the driver, and its archive.
pub(super) const FILE: &str = "driver";
const ARCHIVE: &str = "driver.cpio";
pub(super) const FILES: [&str; 2] = [FILE, ARCHIVE];
/// Start of the driver's line in a recipe.
pub(super) const LINE: &str = "driver ";
/// Folder, beside the images, of a driver that is built, and the log of one that could not be.
pub(super) const SCRATCH: &str = "unfinished-driver";
const LOG: &str = "driver.log";

impl Image {
    /// Returns the driver of the image of backend VMs, and the image's folder, without a look at its other files.
    pub fn backend_driver(
        folder: &Path,
        kernel: Kernel,
    ) -> Result<(Option<Driver>, PathBuf), ImageError> {
        let place = place(BACKEND, folder, kernel);
        Ok((described(&place)?.flatten(), place))
    }

    /// Returns the archive of the driver, which is compared with its sum; `None` if the image has none.
    pub fn driver_archive(&self) -> Result<Option<PathBuf>, ImageError> {
        if self.driver.is_none() {
            return Ok(None);
        }
        let place = self.kernel.with_file_name("");
        match sums::compare(&place, &FILES)? {
            Some(damage) => Err(ImageError::DamagedDriver { place, damage }),
            None => Ok(Some(place.join(ARCHIVE))),
        }
    }

    /// Lists the images in a folder, by their names. Other folders there, such as those of unfinished builds, are none.
    pub fn list(folder: &Path) -> Result<Vec<Listed>, ImageError> {
        match fs::read_dir(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => drop(entries.map_err(io("list", folder))?),
        }
        let mut images = Vec::new();
        for what in [BACKEND, EMULATED_HOST, GUEST] {
            for kernel in Kernel::ALL {
                let place = place(what, folder, kernel);
                let release = match fs::read_to_string(place.join(RELEASE)) {
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    release => release.ok(),
                };
                images.push(Listed {
                    name: format!("{what}-{kernel}"),
                    release,
                    driver: match described(&place) {
                        Ok(None) => ListedDriver::None,
                        Ok(Some(Some(driver))) => ListedDriver::Whole(driver),
                        Ok(Some(None)) | Err(_) => ListedDriver::Damaged,
                    },
                });
            }
        }
        Ok(images)
    }
}

/// An image of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Name of the image's folder.
    pub name: String,
    /// Release of the kernel; `None` if it cannot be read.
    pub release: Option<String>,
    pub driver: ListedDriver,
}

/// The driver of an image of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListedDriver {
    None,
    Whole(Driver),
    /// A description that cannot be read.
    Damaged,
}

/// Builds a driver for a kernel, by its full release and the folder of its modules, and adds its files to the image that is
/// made in the folder `fresh`. The folder of images must be locked.
pub(super) fn add(
    chosen: &Chosen,
    (kernel, release, modules): (Kernel, &str, &Path),
    fresh: &Path,
    options: &BuildOptions<'_>,
) -> Result<(), ImageError> {
    let log = options.folder.join(LOG);
    let built = in_fresh(&options.folder.join(SCRATCH), |scratch| {
        let surroundings = Surroundings {
            kernel,
            release,
            modules,
            scratch,
            log: &log,
            progress: options.progress,
        };
        driver::build(chosen, &surroundings)
    });
    let (driver, archive) = built?;
    write(&fresh.join(FILE), driver.to_string().as_bytes())?;
    write(&fresh.join(ARCHIVE), &archive)?;
    // Log of an earlier failure.
    let _ = fs::remove_file(&log);
    Ok(())
}

/// Returns whether an image has a driver, be it damaged.
pub(super) fn is_there(place: &Path) -> bool {
    fs::symlink_metadata(place.join(FILE)).is_ok()
}

/// Returns the error of a build that would lose the driver of an image.
pub(super) fn loss(place: PathBuf) -> ImageError {
    let driver = match described(&place) {
        Ok(Some(Some(driver))) => format!("driver {} ({})", driver.version, driver.origin),
        _ => "a driver".to_owned(),
    };
    ImageError::LosesDriver { place, driver }
}

/// Reads the description of an image's driver; `Some(None)` if the file is none.
pub(super) fn described(place: &Path) -> Result<Option<Option<Driver>>, ImageError> {
    let path = place.join(FILE);
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => Ok(Some(None)),
        text => Ok(Some(Driver::parse(&text.map_err(io("read", &path))?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    use crate::image::{KERNEL, MODULES, RECIPE, build_backend};

    #[test]
    fn an_image_has_the_driver_that_it_describes_and_its_archive_is_compared_when_it_is_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let place = folder.join("backend-6.1");
        fs::create_dir(&place).expect("a folder");
        for name in [KERNEL, MODULES, RELEASE, ARCHIVE] {
            fs::write(place.join(name), name).expect("room");
        }
        let all = [KERNEL, MODULES, RELEASE, FILE, ARCHIVE];
        sums::write(&place, &all[..3]).expect("they are there");
        let open = || Image::backend(folder, Kernel::V6_1);
        let plain = open().expect("it is whole");
        assert_eq!(
            (plain.driver.clone(), plain.driver_archive().expect("none")),
            (None, None)
        );
        let driver = Driver {
            version: "580.95.05".to_owned(),
            origin: "a file".to_owned(),
            release: "6.1.0-1".to_owned(),
            modules: vec![("/nvidia.ko".into(), String::new())],
            libraries: Vec::new(),
        };
        fs::write(place.join(FILE), driver.to_string()).expect("room");
        sums::write(&place, &all).expect("they are there");
        let image = open().expect("it is whole");
        assert_eq!(image.driver.as_ref(), Some(&driver));
        let found = Image::backend_driver(folder, Kernel::V6_1).expect("it is read");
        assert_eq!(found, (Some(driver.clone()), place.clone()));
        let listed = Image::list(folder).expect("it is read");
        let in_list = |driver| Listed {
            name: "backend-6.1".to_owned(),
            release: Some(RELEASE.to_owned()),
            driver,
        };
        assert_eq!(listed, [in_list(ListedDriver::Whole(driver))]);
        assert_eq!(
            image.driver_archive().expect("it is whole"),
            Some(place.join(ARCHIVE))
        );
        fs::write(place.join(ARCHIVE), "another").expect("room");
        // A VM without a GPU does not need it.
        let error = open()
            .expect("it opens")
            .driver_archive()
            .expect_err("it is damaged");
        let said = error.to_string();
        assert!(
            said.contains("driver.cpio is not as it was built"),
            "{said}"
        );
        fs::write(place.join(FILE), "nonsense").expect("room");
        let error = open().expect_err("it is damaged").to_string();
        let advice = "`wormhole image build backend --driver FILE --kernel 6.1 --rebuild`";
        assert!(error.contains(advice), "{error}");
        assert_eq!(
            Image::list(folder).expect("it is read"),
            [in_list(ListedDriver::Damaged)]
        );
        for bytes in [&b"\xff"[..], b""] {
            fs::write(place.join(FILE), bytes).expect("room");
            assert_eq!(
                Image::list(folder).expect("it is read"),
                [in_list(ListedDriver::Damaged)]
            );
        }
        // An unfinished build is no image.
        let unfinished = folder.join("fresh-aB1");
        fs::create_dir(&unfinished).expect("a folder");
        fs::write(unfinished.join(RELEASE), "6.1.0-1").expect("room");
        assert_eq!(Image::list(folder).expect("it is read").len(), 1);
        fs::write(place.join(RELEASE), b"\xff").expect("room");
        assert_eq!(Image::list(folder).expect("it is read")[0].release, None);
        assert_eq!(Image::list(&folder.join("none")).expect("no images"), []);
    }

    #[test]
    fn a_build_without_the_driver_of_an_image_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let place = folder.join("backend-6.1");
        fs::create_dir(&place).expect("a folder");
        let release = "6.1.0-1-cloud-amd64";
        for name in [KERNEL, MODULES, RELEASE] {
            fs::write(place.join(name), release).expect("room");
        }
        let driver = "version 580.95.05\norigin a file\nrelease 6.1.0-1\nmodule /nvidia.ko\n";
        fs::write(place.join(FILE), driver).expect("room");
        fs::write(
            place.join(RECIPE),
            "module of_another_wormhole \ndriver 0123\n",
        )
        .expect("room");
        sums::write(&place, &[KERNEL, MODULES, RELEASE]).expect("they are there");
        let said = RefCell::new(String::new());
        let build = || {
            build_backend(&BuildOptions {
                folder,
                kernel: Kernel::V6_1,
                rebuild: false,
                progress: &|line| said.borrow_mut().push_str(line),
            })
        };
        let refused = |words: &str| {
            let error = build().expect_err("the driver would be lost").to_string();
            assert!(error.contains(words), "{error}");
            for option in ["--driver FILE", "--rebuild"] {
                assert!(error.contains(option), "{error}");
            }
        };
        refused("has driver 580.95.05 (a file) and is to be built again");
        fs::write(place.join(KERNEL), "damaged").expect("room");
        refused("has driver 580.95.05");
        fs::write(place.join(FILE), "nonsense").expect("room");
        refused("has a driver and");
        assert_eq!(said.borrow().as_str(), "");
        assert!(place.join(FILE).is_file() && !folder.join("lock").exists());
    }
}
