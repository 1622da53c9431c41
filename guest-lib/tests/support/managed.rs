//! Managed memory of the pretended device.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use wormhole_api::{CuResult, ManagedRefresh, Request};
use wormhole_ring::layout::WINDOW_BASE;

use super::Shared;

/// Bytes of a part.
const PART: usize = 2 << 20;

/// Memory that changes sides, by address.
pub struct Managed {
    /// Address of the window in this process.
    base: usize,
    all: BTreeMap<u64, One>,
}

struct One {
    home: u64,
    bytes: u64,
    /// Contents of the device's memory, and of its mirror.
    placed: Option<Vec<u8>>,
    mirror: Option<Vec<u8>>,
}

/// Part of the managed memory at an address that a request frees.
pub enum Free {
    Mirror(u64),
    All(u64),
}

impl Free {
    pub fn of(request: &Request<'_>) -> Option<Self> {
        match request {
            Request::ManagedMirror(message) if message.wanted == 0 => {
                Some(Self::Mirror(message.address.0))
            }
            Request::ManagedClose(message) => Some(Self::All(message.address.0)),
            _ => None,
        }
    }
}

impl Managed {
    pub fn new(base: usize) -> Self {
        Self {
            base,
            all: BTreeMap::new(),
        }
    }

    fn home(&self, address: u64) -> *mut u8 {
        let offset = usize::try_from(address - WINDOW_BASE).expect("small");
        std::ptr::with_exposed_provenance_mut(self.base + offset)
    }

    /// Executes a message about managed memory. Returns nothing for any other.
    pub fn execute(&mut self, request: &Request<'_>, shared: &Shared) -> Option<CuResult> {
        let busy = shared.is_busy.load(Ordering::Acquire);
        if let Some(free) = Free::of(request) {
            self.free(free);
            return Some(CuResult::SUCCESS);
        }
        match request {
            Request::ManagedIdle(_) if busy => return Some(CuResult::NOT_READY),
            Request::ManagedIdle(_) => {}
            Request::ManagedOpen(message) => {
                let one = One {
                    home: message.home.0,
                    bytes: message.bytes,
                    placed: None,
                    mirror: None,
                };
                assert!(self.all.insert(message.address.0, one).is_none());
            }
            Request::ManagedPlace(_) if busy => return Some(CuResult::NOT_READY),
            Request::ManagedPlace(_)
                if shared.lacks_memory.load(Ordering::Acquire) && self.has_mirrors() =>
            {
                return Some(CuResult::OUT_OF_MEMORY);
            }
            Request::ManagedPlace(message) => {
                let (home, bytes) = {
                    let one = &self.all[&message.address.0];
                    (one.home, usize::try_from(one.bytes).expect("small"))
                };
                // SAFETY: the home is a part of the window.
                let data = unsafe { std::slice::from_raw_parts(self.home(home), bytes) }.to_vec();
                let one = self.all.get_mut(&message.address.0).expect("opened");
                assert!(one.placed.replace(data).is_none());
            }
            Request::ManagedFetch(message) if busy && message.concurrent == 0 => {
                return Some(CuResult::NOT_READY);
            }
            Request::ManagedMirror(_) if shared.lacks_memory.load(Ordering::Acquire) => {
                return Some(CuResult::OUT_OF_MEMORY);
            }
            Request::ManagedMirror(message) => {
                let one = self.all.get_mut(&message.address.0).expect("opened");
                let bytes = one.placed.as_ref().expect("placed").len();
                assert!(one.mirror.replace(vec![0xEE; bytes]).is_none());
            }
            Request::ManagedRefresh(_) if busy => return Some(CuResult::NOT_READY),
            Request::ManagedFetch(message) => self.copy(message.address.0, message.bytes, true),
            Request::ManagedPush(message) => self.copy(message.address.0, message.bytes, false),
            Request::MemSet(message) => {
                let byte = message.value.to_ne_bytes()[0];
                let (address, bytes) = (message.destination.0, message.width);
                let (start, one) = self.all.range_mut(..=address).next_back()?;
                let offset = usize::try_from(address - start).expect("small");
                let bytes = usize::try_from(bytes).expect("small");
                match &mut one.placed {
                    Some(data) => data[offset..offset + bytes].fill(byte),
                    None => {
                        let home = one.home + offset as u64;
                        // SAFETY: the home is a part of the window.
                        unsafe { self.home(home).write_bytes(byte, bytes) };
                    }
                }
            }
            _ => return None,
        }
        Some(CuResult::SUCCESS)
    }

    pub fn has_mirrors(&self) -> bool {
        self.all.values().any(|one| one.mirror.is_some())
    }

    pub fn free(&mut self, free: Free) {
        match free {
            Free::Mirror(address) => {
                let one = self.all.get_mut(&address).expect("opened");
                assert!(one.mirror.take().is_some());
            }
            Free::All(address) => {
                self.all.remove(&address).expect("opened");
            }
        }
    }

    /// Executes a refresh, and returns whether the home is current.
    pub fn refresh(&mut self, message: &ManagedRefresh) -> bool {
        let (address, bytes) = (message.address.0, message.bytes);
        let (start, one) = self.all.range(..=address).next_back().expect("opened");
        let offset = usize::try_from(address - start).expect("small");
        let range = offset..offset + usize::try_from(bytes).expect("small");
        let placed = &one.placed.as_ref().expect("placed")[range.clone()];
        let mirror = &one.mirror.as_ref().expect("a mirror")[range];
        let parts = placed.chunks(PART).zip(mirror.chunks(PART));
        let differs: Vec<bool> = parts.map(|(placed, mirror)| placed != mirror).collect();
        let changed = differs.iter().filter(|differs| **differs).count() * PART;
        if changed as u64 > message.most {
            return false;
        }
        for (index, _) in differs.iter().enumerate().filter(|(_, differs)| **differs) {
            self.copy(address + (index * PART) as u64, PART as u64, true);
        }
        true
    }

    fn copy(&mut self, address: u64, bytes: u64, to_home: bool) {
        let base = self.base;
        let (start, one) = self.all.range_mut(..=address).next_back().expect("opened");
        let offset = usize::try_from(address - start).expect("small");
        let bytes = usize::try_from(bytes).expect("small");
        let home = usize::try_from(one.home - WINDOW_BASE).expect("small") + base + offset;
        let home = std::ptr::with_exposed_provenance_mut::<u8>(home);
        let data = &mut one.placed.as_mut().expect("placed")[offset..offset + bytes];
        // SAFETY: the home is a part of the window, and is as long.
        unsafe {
            if to_home {
                home.copy_from(data.as_ptr(), bytes);
            } else {
                data.as_mut_ptr().copy_from(home, bytes);
            }
        }
        if let Some(mirror) = &mut one.mirror {
            mirror[offset..offset + bytes].copy_from_slice(data);
        }
    }
}
