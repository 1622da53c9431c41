//! Images that were loaded in a short time, so that the executor may load them itself the next time, and unload them: the
//! driver has compiled them by then, if it remembers that.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use wormhole_device::{ImageKind, Jit};

/// Longest time of such a load. On an H200 the driver takes some 25 µs for a small image that it has compiled before.
const LONGEST: Duration = Duration::from_micros(200);

/// Most images that are remembered.
const MOST: usize = 1024;

/// Digest of an image, of its kind (the driver may load a library at its first use), and of the options of its compiler. Of two images with one digest, the executor loads both or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Digest(u64);

impl Digest {
    pub fn of(image: &[u8], kind: ImageKind, jit: &Jit) -> Self {
        let mut hasher = DefaultHasher::new();
        (image, kind == ImageKind::Module, &jit.options).hash(&mut hasher);
        Self(hasher.finish())
    }
}

#[derive(Debug, Default)]
pub(super) struct QuickImages(HashSet<Digest>);

impl QuickImages {
    pub fn contains(&self, digest: Digest) -> bool {
        self.0.contains(&digest)
    }

    /// Notes how long the load of an image took, unless it failed. Returns whether it was a short time.
    pub fn note(&mut self, digest: Digest, took: Option<Duration>) -> bool {
        let is_quick = took.is_some_and(|took| took <= LONGEST);
        if !is_quick {
            self.0.remove(&digest);
        } else if self.0.len() < MOST {
            self.0.insert(digest);
        }
        is_quick
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Option<Duration> = Some(Duration::from_micros(30));

    #[test]
    fn the_last_load_of_an_image_with_its_options_says_whether_it_is_quick() {
        let jit = |value| Jit {
            options: vec![(7, value)],
            ..Jit::default()
        };
        let [first, other] =
            [1, 2].map(|value| Digest::of(b"image", ImageKind::Module, &jit(value)));
        let mut quick = QuickImages::default();
        assert!(!quick.contains(first));
        assert!(quick.note(first, SHORT));
        assert!(quick.contains(first) && !quick.contains(other));
        for (image, kind) in [
            (b"imago", ImageKind::Module),
            (b"image", ImageKind::Library),
        ] {
            assert!(!quick.contains(Digest::of(image, kind, &jit(1))));
        }
        for slow in [None, Some(Duration::from_millis(1))] {
            assert!(!quick.note(first, slow));
            assert!(!quick.contains(first));
            quick.note(first, SHORT);
        }
    }

    #[test]
    fn a_guest_cannot_make_it_remember_without_end() {
        let mut quick = QuickImages::default();
        for number in 0..2 * MOST {
            let digest = Digest::of(&number.to_le_bytes(), ImageKind::Module, &Jit::default());
            quick.note(digest, SHORT);
        }
        assert_eq!(quick.0.len(), MOST);
    }
}
