//! Copies between pageable memory and staging buffers. A second thread takes half of each piece of a large copy, since one
//! processor copies far more slowly than the device does.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{LazyLock, OnceLock};
use std::thread::Thread;

use super::copy::host_pointer;
use crate::log;
use crate::session::{OnDevice, spawn_quiet};

/// Bytes from which a copy is large: waking the second thread costs as much as copying some hundred KiB.
pub const LARGE: usize = 4 << 20;
/// Bytes from which a piece of a large copy is halved.
const HALVED: usize = 128 << 10;
/// Least number of processors with which the second thread is used: the program and the backend need some themselves.
const PROCESSORS: usize = 4;
/// Looks of the second thread for a piece before it sleeps, some 200 µs.
const LOOKS: u32 = 4000;
/// Stack bytes, with room for a handler of the program for faults in its own memory.
const STACK: usize = 256 << 10;

/// Manner in which the processor stores a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// In the caches: for a staging buffer, and for memory of the program that they can hold.
    Cached,
    /// Past the caches, so that the processor does not first read what it overwrites (an H200's host: 15 against 8 GB/s).
    Streaming,
}

/// A range of the program's memory, and a part of a staging buffer of the same length.
///
/// Both are valid for the copy, and do not overlap: only functions whose callers vouch for the program's memory make one.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub(super) destination: u64,
    pub(super) source: u64,
    pub(super) bytes: usize,
    pub(super) stores: Stores,
}

impl Piece {
    /// Copies the piece to a staging buffer.
    pub fn copy_up(self, session: OnDevice, is_large: bool) {
        if session.carries_data() {
            // SAFETY: the source is the program's memory, valid for the copy.
            let bytes = unsafe { slice::from_raw_parts(host_pointer(self.source), self.bytes) };
            session.put(self.destination, bytes);
        } else {
            self.copy(is_large);
        }
    }

    /// Copies the piece from a staging buffer.
    pub fn copy_down(self, session: OnDevice, is_large: bool) {
        if session.carries_data() {
            let to = host_pointer(self.destination);
            // SAFETY: the destination is the program's memory, valid for the copy.
            session.get(self.source, unsafe {
                slice::from_raw_parts_mut(to, self.bytes)
            });
        } else {
            self.copy(is_large);
        }
    }

    /// Copies the piece; one of a large copy by two threads, if there is a second one.
    fn copy(self, is_large: bool) {
        if is_large && self.bytes >= HALVED && *HAS_PROCESSORS {
            HELPER.share(self);
        } else {
            self.copy_alone();
        }
    }

    fn copy_alone(self) {
        const WORD: usize = size_of::<__m128i>();
        let (to, from) = (host_pointer(self.destination), host_pointer(self.source));
        // SAFETY: both ranges are valid for the copy and apart. `head` aligns the destination, `body` is whole words.
        unsafe {
            let head = match self.stores {
                Stores::Cached => self.bytes,
                Stores::Streaming => to.align_offset(WORD).min(self.bytes),
            };
            to.copy_from_nonoverlapping(from, head);
            let body = (self.bytes - head) / WORD * WORD;
            for offset in (head..head + body).step_by(WORD) {
                let word = _mm_loadu_si128(from.add(offset).cast());
                _mm_stream_si128(to.add(offset).cast(), word);
            }
            let done = head + body;
            to.add(done)
                .copy_from_nonoverlapping(from.add(done), self.bytes - done);
            // Only this fence orders the stores above.
            _mm_sfence();
        }
    }

    /// Splits the piece at its middle, between two pages of a whole staging buffer.
    fn halves(self) -> [Self; 2] {
        let first = (self.bytes / 2).next_multiple_of(4096).min(self.bytes);
        [
            Self {
                bytes: first,
                ..self
            },
            Self {
                destination: self.destination + first as u64,
                source: self.source + first as u64,
                bytes: self.bytes - first,
                ..self
            },
        ]
    }
}

static HAS_PROCESSORS: LazyLock<bool> =
    LazyLock::new(|| std::thread::available_parallelism().is_ok_and(|n| n.get() >= PROCESSORS));

/// States of the piece that the second thread is offered.
const EMPTY: u32 = 0;
const OFFERED: u32 = 1;
const TAKEN: u32 = 2;

/// The second thread of the process, which starts with the first large copy.
struct Helper {
    /// Whether a caller shares a piece now. Other callers copy alone.
    in_use: AtomicBool,
    state: AtomicU32,
    /// Destination, source and bytes of the piece.
    piece: [AtomicU64; 3],
    streaming: AtomicBool,
    asleep: AtomicBool,
    /// Set once the thread was started; `None` if it cannot be.
    thread: OnceLock<Option<Thread>>,
}

static HELPER: Helper = Helper::new();

impl Helper {
    const fn new() -> Self {
        Self {
            in_use: AtomicBool::new(false),
            state: AtomicU32::new(EMPTY),
            piece: [const { AtomicU64::new(0) }; 3],
            streaming: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            thread: OnceLock::new(),
        }
    }

    /// Copies a piece. The second thread copies the second half, unless it is busy or does not wake in time.
    fn share(&'static self, piece: Piece) {
        let Some(thread) = self.thread.get_or_init(|| self.start()) else {
            return piece.copy_alone();
        };
        if self.in_use.swap(true, Ordering::Acquire) {
            return piece.copy_alone();
        }
        let [first, second] = piece.halves();
        self.offer(second, thread);
        first.copy_alone();
        if self.take(EMPTY) {
            second.copy_alone();
        }
        // The thread copies for about as long as this one has.
        while self.state.load(Ordering::Acquire) != EMPTY {
            std::thread::yield_now();
        }
        self.in_use.store(false, Ordering::Release);
    }

    fn offer(&self, piece: Piece, thread: &Thread) {
        let words = [piece.destination, piece.source, piece.bytes as u64];
        for (place, word) in self.piece.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        let streaming = piece.stores == Stores::Streaming;
        self.streaming.store(streaming, Ordering::Relaxed);
        self.state.store(OFFERED, Ordering::Release);
        // Either the thread sees the offer, since it looks once more after it has announced its sleep, or this thread sees
        // the announcement.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            thread.unpark();
        }
    }

    /// Takes the offered piece, if no thread has taken it: the state becomes `then`.
    fn take(&self, then: u32) -> bool {
        let taken =
            self.state
                .compare_exchange(OFFERED, then, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok()
    }

    fn offered(&self) -> Piece {
        let [destination, source, bytes] = [0, 1, 2].map(|n| self.piece[n].load(Ordering::Relaxed));
        Piece {
            destination,
            source,
            bytes: usize::try_from(bytes).unwrap_or(0),
            stores: match self.streaming.load(Ordering::Relaxed) {
                true => Stores::Streaming,
                false => Stores::Cached,
            },
        }
    }

    #[cold]
    fn start(&'static self) -> Option<Thread> {
        match spawn_quiet("wormhole-copy", STACK, || self.serve()) {
            Ok(thread) => Some(thread),
            Err(error) => {
                log::debug!("large copies have one thread: {error}");
                None
            }
        }
    }

    fn serve(&self) {
        let mut looks = 0;
        loop {
            if self.take(TAKEN) {
                self.offered().copy_alone();
                self.state.store(EMPTY, Ordering::Release);
                looks = 0;
            } else if looks < LOOKS {
                looks += 1;
                std::hint::spin_loop();
            } else {
                self.asleep.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                if self.state.load(Ordering::Relaxed) != OFFERED {
                    std::thread::park();
                }
                self.asleep.store(false, Ordering::Relaxed);
                looks = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(seed: usize, length: usize) -> Vec<u8> {
        let byte = |n: usize| u8::try_from((n * 31 + n / 251 + seed) % 256).unwrap();
        (0..length).map(byte).collect()
    }

    fn address(memory: &[u8], offset: usize) -> u64 {
        (memory.as_ptr().expose_provenance() + offset) as u64
    }

    /// Copies between vectors at some offset each, and compares.
    fn check(
        seed: usize,
        offsets: [usize; 2],
        length: usize,
        stores: Stores,
        copy: impl Fn(Piece),
    ) {
        let source = bytes(seed, offsets[1] + length);
        let destination = vec![0xee; offsets[0] + length + 64];
        let piece = Piece {
            destination: address(&destination, offsets[0]),
            source: address(&source, offsets[1]),
            bytes: length,
            stores,
        };
        copy(piece);
        let destination = std::hint::black_box(destination);
        let (before, rest) = destination.split_at(offsets[0]);
        let (copied, after) = rest.split_at(length);
        assert!(before.iter().chain(after).all(|byte| *byte == 0xee));
        assert!(copied == &source[offsets[1]..], "{offsets:?} {length}");
    }

    #[test]
    fn a_piece_of_any_length_and_alignment_is_copied_and_nothing_beside_it() {
        for (seed, length) in [0, 1, 15, 16, 17, 63, 64, 4095, 4097, 70_001]
            .into_iter()
            .enumerate()
        {
            for offsets in [[0, 0], [1, 0], [7, 13], [16, 3], [15, 15]] {
                for stores in [Stores::Cached, Stores::Streaming] {
                    check(seed, offsets, length, stores, Piece::copy_alone);
                }
            }
        }
    }

    #[test]
    fn every_piece_of_many_callers_is_whole_whoever_copies_its_halves() {
        static OWN: Helper = Helper::new();
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    for round in 0..100 {
                        let length = HALVED + 977 * round;
                        let stores = [Stores::Cached, Stores::Streaming][round % 2];
                        check(caller + round, [round, 5], length, stores, |piece| {
                            OWN.share(piece);
                        });
                    }
                });
            }
        });
        for round in 0..20 {
            // The second thread has to be woken.
            while !OWN.asleep.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            check(round, [1, 5], 4 * HALVED, Stores::Streaming, |piece| {
                OWN.share(piece);
            });
        }
    }
}
