//! Random delays before accesses to shared words: a test mode (`--cfg delays`), and nothing otherwise.
//!
//! Both sides of the window reach each shared word through [`crate::sync`]. With delays either side may come to a word later
//! than it usually does, by a few instructions or by many milliseconds, so that programs meet orders of the two sides that
//! are rare without.

/// Kind of access.
#[derive(Clone, Copy, Debug)]
pub enum Access {
    /// A read. A thread that polls a word makes these without end.
    Read,
    /// A write, or a fence.
    Write,
}

/// Delays this thread at random.
#[cfg(not(all(delays, feature = "std")))]
#[inline]
pub const fn maybe(_: Access) {}

/// Delays this thread at random.
#[cfg(all(delays, feature = "std"))]
pub fn maybe(access: Access) {
    use std::time::Duration;

    let random = random();
    // Sleeps, given processors and spins in 2^16 accesses.
    let [sleeps, yields, spins] = match access {
        Access::Read => [1, 64, 1024],
        Access::Write => [256, 2048, 16_384],
    };
    let (choice, length) = (random >> 32 & 0xffff, random >> 48);
    if choice < sleeps {
        std::thread::sleep(Duration::from_micros(length % 2000));
    } else if choice < yields {
        std::thread::yield_now();
    } else if choice < spins {
        (0..length % 1000).for_each(|_| core::hint::spin_loop());
    }
}

/// Returns this thread's next random number (Marsaglia's xorshift).
#[cfg(all(delays, feature = "std"))]
fn random() -> u64 {
    use std::cell::Cell;

    std::thread_local! {
        static STATE: Cell<u64> = const { Cell::new(0) };
    }

    let next = |state: &Cell<u64>| {
        let mut word = state.get();
        if word == 0 {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed();
            let now = now.map_or(0, |now| u64::from(now.subsec_nanos()));
            // Threads that begin at the same time differ by their place in memory.
            word = (now ^ std::ptr::from_ref(state) as u64) | 1;
        }
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        state.set(word);
        word
    };
    // A thread that ends has no state any more, and no delays.
    STATE.try_with(next).unwrap_or(u64::MAX)
}
