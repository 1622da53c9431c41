//! Context limits (`cuCtxGetLimit`, `cuCtxSetLimit`).

use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::constants::limit::{
    DEV_RUNTIME_PENDING_LAUNCH_COUNT, MALLOC_HEAP_SIZE, MAX, MAX_L2_FETCH_GRANULARITY,
    PERSISTING_L2_CACHE_SIZE, PRINTF_FIFO_SIZE, STACK_SIZE,
};
use wormhole_device::{CuError, Result};

/// Most bytes of a thread's local memory (CUDA programming guide, technical specifications).
const MAX_STACK: u64 = 512 << 10;

/// Values of the supported limits.
#[derive(Debug)]
pub struct Limits {
    stack: AtomicU64,
    printf: AtomicU64,
    heap: AtomicU64,
    launches: AtomicU64,
    granularity: AtomicU64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            stack: AtomicU64::new(1024),
            printf: AtomicU64::new(1 << 20),
            heap: AtomicU64::new(8 << 20),
            launches: AtomicU64::new(2048),
            granularity: AtomicU64::new(64),
        }
    }
}

impl Limits {
    fn cell(&self, limit: u32) -> Result<&AtomicU64> {
        match limit {
            STACK_SIZE => Ok(&self.stack),
            PRINTF_FIFO_SIZE => Ok(&self.printf),
            MALLOC_HEAP_SIZE => Ok(&self.heap),
            DEV_RUNTIME_PENDING_LAUNCH_COUNT => Ok(&self.launches),
            MAX_L2_FETCH_GRANULARITY => Ok(&self.granularity),
            limit if limit < MAX => Err(CuError::UNSUPPORTED_LIMIT),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// Returns a limit (`cuCtxGetLimit`).
    pub fn get(&self, limit: u32) -> Result<u64> {
        if limit == PERSISTING_L2_CACHE_SIZE {
            return Ok(0);
        }
        Ok(self.cell(limit)?.load(Ordering::Relaxed))
    }

    /// Sets a limit (`cuCtxSetLimit`).
    pub fn set(&self, limit: u32, value: u64) -> Result<()> {
        let cell = self.cell(limit)?;
        let allowed = match limit {
            STACK_SIZE => value <= MAX_STACK,
            MAX_L2_FETCH_GRANULARITY => value <= 128,
            _ => true,
        };
        if !allowed {
            return Err(CuError::INVALID_VALUE);
        }
        cell.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the most bytes of printed text buffered between synchronizations.
    pub fn printf(&self) -> u64 {
        self.printf.load(Ordering::Relaxed)
    }

    /// Returns the bytes of the heap of device `malloc`.
    pub fn heap(&self) -> u64 {
        self.heap.load(Ordering::Relaxed)
    }
}
