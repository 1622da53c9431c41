//! Choice of devices of the NVIDIA driver.

use std::fmt;

use super::MOST;

/// Syntax of the choice, for error messages.
pub(super) const FORM: &str = "cuda:N with the number of a GPU, several with commas between them";

/// Ordinals of devices of the NVIDIA driver, without repetition, from 1 to [`MOST`] of them, in the order in which
/// programs see them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CudaChoice(pub Vec<u32>);

impl CudaChoice {
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut ordinals = Vec::new();
        for name in text.split(',') {
            let ordinal = match name.split_once(':') {
                None if name == "cuda" => 0,
                Some(("cuda", ordinal)) => ordinal.parse().ok()?,
                _ => return None,
            };
            if ordinals.contains(&ordinal) || ordinals.len() == MOST {
                return None;
            }
            ordinals.push(ordinal);
        }
        Some(Self(ordinals))
    }
}

impl fmt::Display for CudaChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, ordinal) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}cuda:{ordinal}")?;
        }
        Ok(())
    }
}
