//! Launch functions before CUDA 4: block shape, shared memory and parameters are set on the function.

use crate::error::{CuError, Result};

/// Maximum bytes of parameters.
const PARAMETERS: usize = 4096;

/// Settings for a function's next launches.
#[derive(Debug)]
pub struct Settings {
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    parameters: Vec<u8>,
    /// Size from `cuParamSetSize`, if it was called.
    size: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            block: [1; 3],
            shared: 0,
            parameters: Vec::new(),
            size: None,
        }
    }
}

impl Settings {
    /// Writes bytes of the parameters.
    pub fn set(&mut self, offset: i32, bytes: impl ExactSizeIterator<Item = u8>) -> Result {
        let start = usize::try_from(offset).map_err(|_| CuError::INVALID_VALUE)?;
        let end = start
            .checked_add(bytes.len())
            .filter(|end| *end <= PARAMETERS);
        let end = end.ok_or(CuError::INVALID_VALUE)?;
        if self.parameters.len() < end {
            self.parameters.resize(end, 0);
        }
        for (place, byte) in self.parameters[start..end].iter_mut().zip(bytes) {
            *place = byte;
        }
        Ok(())
    }

    /// Sets the size of the parameters (`cuParamSetSize`).
    pub fn set_size(&mut self, bytes: u32) -> Result {
        let size = bytes as usize;
        if size > PARAMETERS {
            return Err(CuError::INVALID_VALUE);
        }
        self.size = Some(size);
        Ok(())
    }

    /// Returns the parameters for a launch.
    pub fn parameters(&self) -> Vec<u8> {
        let mut parameters = self.parameters.clone();
        parameters.resize(self.size.unwrap_or(parameters.len()), 0);
        parameters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_where_they_were_set() {
        let mut settings = Settings::default();
        settings.set(8, [1, 2, 3, 4].into_iter()).unwrap();
        settings.set(0, [9; 2].into_iter()).unwrap();
        assert_eq!(settings.parameters(), [9, 9, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
        settings.set_size(10).unwrap();
        assert_eq!(settings.parameters(), [9, 9, 0, 0, 0, 0, 0, 0, 1, 2]);
        for offset in [-1, 4093, i32::MAX] {
            assert_eq!(
                settings.set(offset, [0; 4].into_iter()),
                Err(CuError::INVALID_VALUE)
            );
        }
        assert_eq!(settings.set_size(4097), Err(CuError::INVALID_VALUE));
    }
}
