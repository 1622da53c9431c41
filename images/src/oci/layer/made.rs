//! Paths that a layer has made, which its whiteouts do not remove.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::OciError;

/// Most bytes that the paths of a layer take.
const MOST_BYTES: u64 = 512 << 20;
/// Bytes that a name takes beside its own.
const OVERHEAD: u64 = 64;

/// Place of a path in the tree of paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place(u32);

const ROOT: Place = Place(0);

/// Tree of paths. A path takes memory for the names that it does not share with others.
#[derive(Debug, Default)]
pub struct Made {
    /// Places by those of their folders and their names.
    places: HashMap<(Place, OsString), Place>,
    bytes: u64,
    /// Folders without anything of lower layers, by device and inode.
    cleared: HashSet<(u64, u64)>,
}

impl Made {
    /// Adds a path and all folders on the way to it.
    ///
    /// # Errors
    /// The paths take too much memory.
    pub fn add(&mut self, path: &Path) -> Result<(), OciError> {
        let mut place = ROOT;
        for name in path {
            place = match self.below(Some(place), name) {
                Some(place) => place,
                None => self.grow(place, name)?,
            };
        }
        Ok(())
    }

    fn grow(&mut self, folder: Place, name: &OsStr) -> Result<Place, OciError> {
        self.bytes += OVERHEAD + name.len() as u64;
        // No place overflows: each takes bytes.
        let place = u32::try_from(self.places.len() + 1).map(Place);
        match place {
            Ok(place) if self.bytes <= MOST_BYTES => {
                self.places.insert((folder, name.to_owned()), place);
                Ok(place)
            }
            _ => Err(OciError::Names(MOST_BYTES)),
        }
    }

    /// Notes that all of lower layers is being removed from a folder, by device and inode. Returns false if it was before:
    /// only this layer adds to it afterwards.
    pub fn clear(&mut self, device: u64, inode: u64) -> bool {
        self.cleared.insert((device, inode))
    }

    /// Returns the place of a path. `None` if the layer has not made it.
    pub fn place(&self, path: &Path) -> Option<Place> {
        path.iter()
            .try_fold(ROOT, |place, name| self.below(Some(place), name))
    }

    /// Returns the place of a name in the folder at a place. `None` if the layer has not made it.
    pub fn below(&self, place: Option<Place>, name: &OsStr) -> Option<Place> {
        self.places.get(&(place?, name.to_owned())).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_with_their_folders_alone() {
        let mut made = Made::default();
        for path in ["a/b/c", "a/d", "c"] {
            made.add(Path::new(path)).expect("few");
        }
        for path in ["", "a", "a/b", "a/b/c", "a/d", "c"] {
            assert!(made.place(Path::new(path)).is_some(), "{path}");
        }
        for path in ["b", "d", "a/c", "a/b/d", "a/b/c/d"] {
            assert!(made.place(Path::new(path)).is_none(), "{path}");
        }
    }

    #[test]
    fn paths_of_a_layer_take_a_bounded_part_of_memory() {
        let mut made = Made::default();
        let long = "n/".repeat(100);
        for last in 0..100 {
            let path = format!("{long}{last}");
            made.add(Path::new(&path)).expect("few");
        }
        // Each name once, though each path begins with the same 100.
        assert_eq!((made.places.len(), made.bytes), (200, 200 * 64 + 290));
        made.bytes = MOST_BYTES - OVERHEAD - 4;
        assert!(made.add(Path::new("n/n/name")).is_ok());
        assert!(made.add(Path::new("n/n/name")).is_ok());
        let refused = made.add(Path::new("n/n/e"));
        assert!(matches!(refused, Err(OciError::Names(MOST_BYTES))));
    }
}
