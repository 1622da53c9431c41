//! Random delays before accesses to shared words: a test mode (`--cfg delays`), and nothing otherwise.
//!
//! Both sides of the window reach each shared word through [`crate::sync`]. With delays either side may come to a word later
//! than it usually does, by a few instructions or by many milliseconds, so that programs meet orders of the two sides that
//! are rare without.

/// Delays this thread at random.
#[cfg(not(all(delays, feature = "std")))]
#[inline]
pub const fn maybe() {}

/// Delays this thread at random.
#[cfg(all(delays, feature = "std"))]
pub fn maybe() {
    use std::cell::Cell;
    use std::time::Duration;

    std::thread_local! {
        static STATE: Cell<u64> = const { Cell::new(0) };
    }

    // A thread that ends has no state any more.
    let Ok(random) = STATE.try_with(|state| {
        let mut word = state.get();
        if word == 0 {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed();
            let now = now.map_or(0, |now| now.as_nanos() as u64);
            // Threads that begin at the same time differ by their place in memory.
            word = (now ^ std::ptr::from_ref(state) as u64) | 1;
        }
        // Marsaglia's xorshift.
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        state.set(word);
        word
    }) else {
        return;
    };
    // A thread that polls a word comes here without end, so that most accesses have none.
    let (choice, length) = (random >> 32 & 0xffff, random >> 48);
    match choice {
        0 => std::thread::sleep(Duration::from_micros(length % 2000)),
        1..64 => std::thread::yield_now(),
        64..1024 => (0..length % 2000).for_each(|_| core::hint::spin_loop()),
        _ => {}
    }
}
