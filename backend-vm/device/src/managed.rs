//! Variables of images that host and device share (`__managed__`).

/// Alignment of a place, and the greatest one of a variable.
const ALIGNMENT: u64 = 256;

/// Host memory for the managed variables of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManagedPlace {
    /// Address, a multiple of 256.
    pub address: u64,
    pub bytes: u64,
}

/// Layout of the variables: one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    bytes: u64,
}

impl Layout {
    /// Returns the offset of the next variable; `None` for an invalid alignment or size.
    pub fn add(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        if !alignment.is_power_of_two() || alignment > ALIGNMENT {
            return None;
        }
        let offset = self.bytes.checked_next_multiple_of(alignment)?;
        // Limit of the address space.
        self.bytes = offset.checked_add(bytes).filter(|end| *end < 1 << 47)?;
        Some(offset)
    }

    /// Returns the address of the first variable; `None` if the place is too small for all of them or not aligned.
    pub fn start_in(&self, place: ManagedPlace) -> Option<u64> {
        let fits = place.bytes >= self.bytes && place.address.is_multiple_of(ALIGNMENT);
        fits.then_some(place.address)
    }

    /// Returns the size of all variables.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_lie_at_their_alignments_and_fit_their_place() {
        let mut layout = Layout::default();
        assert_eq!(layout.add(3, 1), Some(0));
        assert_eq!(layout.add(8, 8), Some(8));
        assert_eq!(layout.add(1, 256), Some(256));
        assert_eq!(layout.add(1, 3), None);
        assert_eq!(layout.add(1, 512), None);
        assert_eq!(layout.add(u64::MAX, 1), None);
        assert_eq!(layout.bytes(), 257);
        let place = |address, bytes| ManagedPlace { address, bytes };
        assert_eq!(layout.start_in(place(4096, 257)), Some(4096));
        assert_eq!(layout.start_in(place(4096, 256)), None);
        assert_eq!(layout.start_in(place(4097, 4096)), None);
    }
}
