//! Random numbers that a seed reproduces (xorshift64*), shared by threads.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub struct Random(AtomicU64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1))
    }

    pub fn next(&self) -> u64 {
        let mut state = self.0.load(Ordering::Relaxed);
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        self.0.store(state, Ordering::Relaxed);
        state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns a number below `limit`, which is not 0.
    pub fn below(&self, limit: usize) -> usize {
        usize::try_from(self.next() >> 32).unwrap() % limit
    }

    pub fn one_in(&self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn byte(&self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    pub fn word(&self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Now and then spins a moment, or yields.
    pub fn delay(&self) {
        match self.below(64) {
            0 => std::thread::yield_now(),
            1..=8 => (0..self.below(200)).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }
}
