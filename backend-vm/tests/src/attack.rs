//! Attacks on a live window, random and directed, descriptors that block the process
//! that closes them, and writes that hold a lock of the kernel.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread::JoinHandle;

use wormhole_api::MESSAGES;
use wormhole_ring::layout::{MAX_RECORD, RECORD_HEADER, RING_BYTES, UNIT, session};

use crate::guest::Guest;
use crate::random::Random;

/// A record as it lies in a ring, to be mutated.
#[derive(Clone)]
pub struct Entry {
    pub message: u16,
    pub slot: u16,
    pub device: u16,
    pub body: Vec<u8>,
    /// Wrong value for this header field, if any; `units` and `lap` likewise.
    pub body_len: Option<u32>,
    pub units: Option<u64>,
    pub lap: Option<u32>,
    pub pad: bool,
}

/// Writes entries straight into a ring, as its only producer.
pub struct Writer {
    segment: *mut u8,
    /// Bytes written since the session began.
    pub cursor: u64,
}

// SAFETY: a pointer to shared memory that the guest keeps mapped, used through volatile accesses.
unsafe impl Send for Writer {}

impl Writer {
    pub fn new(guest: &Guest) -> Self {
        let mut writer = Self {
            segment: guest.segment,
            cursor: 0,
        };
        writer.cursor = writer.word(session::TAIL);
        writer
    }

    pub fn word(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= session::BYTES);
        // SAFETY: inside the segment.
        unsafe { self.segment.add(offset).cast::<u64>().read_volatile() }
    }

    pub fn set_word(&self, offset: usize, value: u64) {
        assert!(offset + 8 <= session::BYTES);
        // SAFETY: inside the segment.
        unsafe { self.segment.add(offset).cast::<u64>().write_volatile(value) }
    }

    pub fn set_byte(&self, offset: usize, value: u8) {
        assert!(offset < session::BYTES);
        // SAFETY: inside the segment.
        unsafe { self.segment.add(offset).write_volatile(value) }
    }

    /// Returns the offset of the next entry in the segment.
    pub fn place(&self) -> usize {
        session::RING_BASE + (self.cursor as usize & (RING_BYTES - 1))
    }

    /// Writes an entry, valid or not, and publishes it.
    pub fn write(&mut self, entry: &Entry, sequence: u64) {
        let bytes = (RECORD_HEADER + entry.body.len()).next_multiple_of(UNIT);
        assert!(bytes <= MAX_RECORD);
        let left = RING_BYTES - (self.cursor as usize & (RING_BYTES - 1));
        let lap = |cursor: u64| (cursor / RING_BYTES as u64) << 32;
        if left < bytes {
            let place = self.place();
            let end = self.cursor + left as u64;
            self.set_word(session::TAIL, end);
            self.set_word(place, lap(self.cursor) | 1 << 16 | (left / UNIT) as u64);
            self.cursor = end;
        }
        let place = self.place();
        let cursor = self.cursor;
        self.cursor += bytes as u64;
        self.set_word(session::TAIL, self.cursor);
        let body_len = entry.body_len.unwrap_or(entry.body.len() as u32);
        let heads =
            u64::from(entry.message) | u64::from(entry.slot) << 32 | u64::from(entry.device) << 48;
        self.set_word(place + 8, heads);
        self.set_word(place + 16, u64::from(body_len) << 32);
        self.set_word(place + 24, sequence);
        for (index, byte) in entry.body.iter().enumerate() {
            self.set_byte(place + RECORD_HEADER + index, *byte);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let units = entry.units.unwrap_or((bytes / UNIT) as u64);
        let lap = entry.lap.map_or(lap(cursor), |lap| u64::from(lap) << 32);
        self.set_word(place, lap | u64::from(entry.pad) << 16 | units);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// Mutates a valid entry, with knowledge of the grammar.
pub fn mutate(entry: &mut Entry, random: &Random) {
    for _ in 0..=random.below(3) {
        // Mutations of the content come more often than those of the ring, which end the session.
        match random.below(32).saturating_sub(16) {
            0..=4 if !entry.body.is_empty() => {
                let at = random.below(entry.body.len());
                entry.body[at] = random.byte();
            }
            5..=6 if entry.body.len() >= 8 => {
                // Replaces a whole field by an extreme value.
                let at = random.below(entry.body.len() / 8) * 8;
                let extremes = [0, 1, 2, u64::MAX, 1 << 31, 1 << 32, 1 << 38, 1 << 63];
                let value: u64 = extremes[random.below(extremes.len())];
                entry.body[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            7 if !entry.body.is_empty() => {
                entry.body.truncate(random.below(entry.body.len()));
            }
            8 => {
                let extra = random.below(200);
                entry.body.extend((0..extra).map(|_| random.byte()));
            }
            9 => entry.message = MESSAGES[random.below(MESSAGES.len())].id,
            10 => entry.slot = random.below(256) as u16,
            11 => entry.body_len = Some(random.next() as u32 >> random.below(32)),
            12 => entry.units = Some(random.below(128) as u64),
            13 => entry.lap = Some(random.below(3) as u32),
            14 => entry.pad = true,
            15 if random.one_in(2) => entry.device = random.below(4) as u16,
            _ => entry.slot = random.below(4) as u16,
        }
    }
}

/// Returns a socket that takes an hour to close, and its peer. Dropping the peer lets it close at
/// once.
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 3600,
    };
    let length = libc::socklen_t::try_from(size_of_val(&linger)).unwrap();
    // SAFETY: an open descriptor, and a local structure of the length given.
    let set = unsafe {
        libc::setsockopt(
            near.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            length,
        )
    };
    assert_eq!(set, 0);
    near.set_nonblocking(true).unwrap();
    // The peer reads none of it, and SO_LINGER makes close wait until all is sent.
    while (&near).write(&[0; 65536]).is_ok() {}
    (near.into(), far)
}

/// A write to a descriptor in which the kernel waits for the memory to write (userfaultfd(2)). It
/// ends when this value is dropped.
pub struct EndlessWrite {
    faults: Option<File>,
    thread: Option<JoinHandle<()>>,
}

impl EndlessWrite {
    const BYTES: usize = 4096;

    /// Starts the write, and returns when it waits. Returns none where the system lets this process
    /// have no such memory.
    pub fn start(descriptor: OwnedFd) -> Option<Self> {
        // The requests UFFDIO_API and UFFDIO_REGISTER with their structures, from Linux's
        // userfaultfd.h.
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        /// Size of a message about a fault.
        const FAULT: usize = 32;
        let mut version = [0xaa_u64, 0, 0];
        // SAFETY: the calls get local structures of the sizes in the requests; the mapping is new,
        // and stays.
        let (mut faults, page) = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
            let faults = File::from_raw_fd(fd);
            if libc::ioctl(fd, API, version.as_mut_ptr()) != 0 {
                return None;
            }
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), Self::BYTES, access, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            // The range, the mode (a missing page) and room for an answer.
            let mut range = [page as u64, Self::BYTES as u64, 1, 0];
            if libc::ioctl(fd, REGISTER, range.as_mut_ptr()) != 0 {
                return None;
            }
            (faults, page as usize)
        };
        let thread = std::thread::spawn(move || {
            let page = page as *const libc::c_void;
            // SAFETY: an open descriptor, and a mapped page, which only the kernel reads.
            unsafe {
                libc::write(descriptor.as_raw_fd(), page, Self::BYTES);
            }
        });
        faults.read_exact(&mut [0; FAULT]).unwrap();
        Some(Self {
            faults: Some(faults),
            thread: Some(thread),
        })
    }
}

impl Drop for EndlessWrite {
    fn drop(&mut self) {
        // Without the descriptor the page reads as zeros.
        drop(self.faults.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
