//! Kernel parameters as the driver reads them: behind them there are zeros, as many as any kernel may have.
//!
//! `cuFuncGetParamInfo` tells their size from one table of a cubin, and the driver may read as many bytes as another
//! table says. In a cubin that a guest made up the two differ; without the zeros the rest would be the worker's memory.

use std::cell::RefCell;

use wormhole_device::{CuError, Result};

/// The most bytes of parameters of a kernel (CUDA programming guide, `__global__` function parameters), and 4 more.
const MOST: usize = 32 << 10;

thread_local! {
    /// Allocated by a thread's first launch, and used again by all that follow.
    static BUFFER: RefCell<Padded> = RefCell::new(Padded::new());
}

#[derive(Debug)]
struct Padded {
    bytes: Box<[u8; MOST]>,
    /// All behind are zeros.
    used: usize,
}

impl Padded {
    fn new() -> Self {
        Self {
            bytes: Box::new([0; MOST]),
            used: 0,
        }
    }

    fn hold(&mut self, parameters: &[u8]) -> Result<&mut [u8; MOST]> {
        let count = parameters.len();
        let place = self.bytes.get_mut(..count).ok_or(CuError::INVALID_VALUE)?;
        place.copy_from_slice(parameters);
        if let Some(before) = self.bytes.get_mut(count..self.used) {
            before.fill(0);
        }
        self.used = count;
        Ok(&mut self.bytes)
    }
}

/// Calls `launch` with the parameters at the begin of a buffer of zeros.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`: no kernel has so many. What `launch` returns.
pub fn padded<R>(
    parameters: &[u8],
    launch: impl FnOnce(&mut [u8; MOST]) -> Result<R>,
) -> Result<R> {
    BUFFER.with_borrow_mut(|buffer| launch(buffer.hold(parameters)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behind_the_parameters_there_are_zeros_whatever_came_before() {
        for parameters in [&[1; MOST][..], &[2; 8], &[], &[3; 24], &[4; 8]] {
            let seen = padded(parameters, |buffer| Ok(buffer.to_vec())).unwrap();
            let (front, rest) = seen.split_at(parameters.len());
            assert_eq!(front, parameters);
            assert!(rest.iter().all(|byte| *byte == 0), "{}", parameters.len());
        }
        let refused = padded(&[0; MOST + 1], |_| Ok(()));
        assert_eq!(refused, Err(CuError::INVALID_VALUE));
    }
}
