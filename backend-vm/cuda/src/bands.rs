//! Reservation of address space, so that device memory has the same addresses in every worker.
//!
//! By default the driver allocates where the kernel's search for free addresses ends. This address is random and may
//! collide with mappings of the guest process. With all address space above one address reserved before `cuInit`,
//! device memory lies directly below that address, the same in every worker (measured on driver 580: device and host
//! allocations descend from it; memory pools and virtual memory use a low region of their own).

use std::fs;
use std::hint::black_box;
use std::io;

use wormhole_ring::band;
use wormhole_ring::layout::RESERVED_ABOVE;

/// End of the address space of a 64-bit process with four-level page tables.
const USER_END: u64 = 0x7fff_ffff_f000;
/// Greatest number of readings of the map, since other threads may map while the gaps are filled.
const PASSES: usize = 32;

/// Reason why the bands could not be reserved.
#[derive(Debug, thiserror::Error)]
pub enum BandError {
    #[error("/proc/self/maps cannot be read: {0}")]
    Maps(#[source] io::Error),
    #[error("/proc/self/maps has a line that is no mapping: {0:?}")]
    Line(String),
    #[error("reserving {start:#x}..{end:#x} failed: {source}")]
    Reserve {
        start: u64,
        end: u64,
        source: io::Error,
    },
    #[error("other threads kept mapping memory while the address bands were reserved")]
    Unstable,
}

/// Reserves all unused address space above [`RESERVED_ABOVE`], with `PROT_NONE` mappings that use no memory. Must be
/// called once, before `cuInit`, and before the process starts threads: later mappings (stacks of threads, libraries)
/// lie among the device's memory.
///
/// The main thread's stack cannot grow afterwards; half a megabyte of it is touched first.
pub fn reserve_bands() -> Result<(), BandError> {
    grow_stack();
    for _ in 0..PASSES {
        let maps = fs::read_to_string("/proc/self/maps").map_err(BandError::Maps)?;
        let gaps = gaps(&maps)?;
        if gaps.is_empty() {
            return Ok(());
        }
        for (start, end) in gaps {
            reserve(start, end)?;
        }
    }
    Err(BandError::Unstable)
}

#[inline(never)]
fn grow_stack() {
    black_box([0_u8; 512 << 10]);
}

/// Finds the gaps between the mappings, above [`RESERVED_ABOVE`].
fn gaps(maps: &str) -> Result<Vec<(u64, u64)>, BandError> {
    let mut gaps = Vec::new();
    let mut from = RESERVED_ABOVE;
    for line in maps.lines() {
        let parsed = line
            .split_whitespace()
            .next()
            .and_then(|range| range.split_once('-'));
        let bounds = parsed.and_then(|(start, end)| {
            Some((
                u64::from_str_radix(start, 16).ok()?,
                u64::from_str_radix(end, 16).ok()?,
            ))
        });
        let (start, end) = bounds.ok_or_else(|| BandError::Line(line.to_owned()))?;
        if start > from && from < USER_END {
            gaps.push((from, start.min(USER_END)));
        }
        from = from.max(end);
    }
    if from < USER_END {
        gaps.push((from, USER_END));
    }
    Ok(gaps)
}

fn reserve(start: u64, end: u64) -> Result<(), BandError> {
    match band::reserve(start, end - start) {
        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(BandError::Reserve {
            start,
            end,
            source: error,
        }),
        // Another thread's mapping there is found when the map is read again.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    #[test]
    fn gaps_are_what_lies_between_mappings_above_the_device_band() {
        let maps = "5000-6000 rw-p 0 00:00 0\n\
                    63fffff00000-640000001000 rw-p 0 00:00 0\n\
                    640000001000-640000002000 rw-p 0 00:00 0\n\
                    7f0000000000-7f0000001000 r-xp 0 00:00 0 /lib/x y\n\
                    ffffffffff600000-ffffffffff601000 --xp 0 00:00 0 [vsyscall]\n";
        assert_eq!(
            gaps(maps).expect("maps"),
            [
                (0x6400_0000_2000, 0x7f00_0000_0000),
                (0x7f00_0000_1000, USER_END)
            ]
        );
        assert!(gaps("nonsense\n").is_err());
    }

    /// Runs in a child process, since the reservation stays.
    #[test]
    fn afterwards_the_kernel_maps_below_the_device_band() {
        const CHILD: &str = "WORMHOLE_TEST_BANDS";
        if std::env::var_os(CHILD).is_none() {
            let me = std::env::current_exe().expect("own path");
            let status = std::process::Command::new(me)
                .args([
                    "--exact",
                    "bands::tests::afterwards_the_kernel_maps_below_the_device_band",
                ])
                .env(CHILD, "1")
                .status()
                .expect("start");
            assert!(status.success());
            return;
        }
        reserve_bands().expect("reserve");
        // SAFETY: a new mapping where the kernel likes.
        let mapped = unsafe {
            libc::mmap(
                ptr::null_mut(),
                1 << 20,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        assert!((mapped.addr() as u64) < RESERVED_ABOVE, "{mapped:?}");
    }
}
