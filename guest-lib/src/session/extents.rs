//! The guest's side of the arena: what the supervisor granted, mapped, and divided.

use std::sync::{Mutex, PoisonError};

use wormhole_ring::arena::{Arena, ArenaError};
use wormhole_ring::layout::SEGMENT_BYTES;

use super::Session;
use super::control::ChannelError;
use super::mapping::Window;
use crate::error::{CuError, Result};
use crate::log;

/// Segments that are asked for at least, so that small allocations do not each cross the control stream.
const GROWTH: u64 = 8;

/// The arena of this process.
#[derive(Debug)]
pub struct Extents {
    window: Window,
    arena: Mutex<Arena>,
}

impl Extents {
    pub fn new(window: Window) -> Self {
        Self {
            window,
            arena: Mutex::new(Arena::new()),
        }
    }

    /// Maps a granted run and adds it as one extent: no allocation spans two.
    pub fn add(&self, first: u32, count: u32) -> std::io::Result<()> {
        self.window.map(first, count, false)?;
        let bytes = u64::from(count) * SEGMENT_BYTES as u64;
        self.arena
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add_extent(self.window.address(first), bytes)
            .map_err(std::io::Error::other)
    }
}

impl Session {
    /// Memory that the device reaches too, at the same address. Asks for more where none is free.
    pub fn allocate_arena(&self, bytes: u64, align: u64) -> Result<u64> {
        let extents = &self.extents;
        loop {
            let allocated = {
                let mut arena = extents.arena.lock().unwrap_or_else(PoisonError::into_inner);
                arena.allocate(bytes, align)
            };
            match allocated {
                Ok(block) => return Ok(block.address),
                Err(ArenaError::NoRoom { .. }) => self.grow_arena(bytes)?,
                Err(error) => {
                    log::error_once!("{error}");
                    return Err(CuError::INVALID_VALUE);
                }
            }
        }
    }

    fn grow_arena(&self, bytes: u64) -> Result {
        self.alive()?;
        let needed = bytes.div_ceil(SEGMENT_BYTES as u64);
        let run = u32::try_from(needed.max(GROWTH))
            .ok()
            .and_then(|segments| self.control.request_arena(segments).ok());
        // A large step may exceed a quota that the bare need does not.
        let run = match run {
            Some(run) => run,
            None => {
                let segments = u32::try_from(needed).map_err(|_| CuError::OUT_OF_MEMORY)?;
                match self.control.request_arena(segments) {
                    Ok(run) => run,
                    Err(ChannelError::Stream(_)) => {
                        self.end_of_stream();
                        return Err(self.alive().err().unwrap_or(CuError::OUT_OF_MEMORY));
                    }
                    Err(error) => {
                        log::error_once!("{error}");
                        return Err(CuError::OUT_OF_MEMORY);
                    }
                }
            }
        };
        self.extents.add(run.first, run.count).map_err(|error| {
            log::error_once!("granted arena cannot be used: {error}");
            CuError::OUT_OF_MEMORY
        })
    }

    /// Gives arena memory back. The device has finished with it.
    pub fn free_arena(&self, address: u64) {
        let mut arena = self
            .extents
            .arena
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = arena.free(address) {
            log::error_once!("{error}");
        }
    }
}
