//! Parameters of a kernel in a buffer that is longer than they are.

/// Bytes of a constant bank, in which a kernel finds its parameters.
const BANK: usize = 64 << 10;

/// Copy of a kernel's parameters, followed by zeros.
///
/// The driver copies as many bytes as its own tables of the kernel say, whatever length it is given. These tables come
/// from the image, so a damaged image can make that more than the parameters that its other tables describe. The driver
/// then reads zeros.
#[derive(Clone, Debug)]
pub struct PaddedParameters {
    bytes: Vec<u8>,
    given: usize,
}

impl PaddedParameters {
    #[must_use]
    pub fn new(given: &[u8]) -> Self {
        let mut bytes = vec![0; given.len().max(BANK)];
        bytes[..given.len()].copy_from_slice(given);
        Self {
            bytes,
            given: given.len(),
        }
    }

    /// Returns the parameters without the zeros.
    #[must_use]
    pub fn given(&self) -> &[u8] {
        &self.bytes[..self.given]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behind_the_parameters_of_a_kernel_are_zeros_to_the_end_of_a_bank() {
        for given in [&[][..], &[7; 3], &[7; BANK - 1]] {
            let parameters = PaddedParameters::new(given);
            assert_eq!(parameters.given(), given);
            assert_eq!(parameters.bytes.len(), BANK);
            assert!(
                parameters.bytes[given.len()..]
                    .iter()
                    .all(|byte| *byte == 0)
            );
        }
        let long = [7; BANK + 1];
        assert_eq!(PaddedParameters::new(&long).given(), long);
    }
}
