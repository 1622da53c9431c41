//! Accesses a device of the host that is passed through, as a hostile guest: its configuration, its BARs wherever the
//! guest has moved them, the MSI-X table.
//!
//! The input describes the device, as a hostile one may describe itself: its configuration space, and the size of each
//! region. A list of accesses follows.

use wormhole_monitor::fuzzing::{PassedThrough, SPACE};

/// Ports of configuration mechanism 1: address and data.
const ADDRESS: u64 = 0xcf8;
const DATA: u64 = 0xcfc;
const SLOT: u8 = 1;

pub fn run(input: &[u8]) {
    let Some((space, rest)) = input.split_first_chunk::<SPACE>() else {
        return;
    };
    let Some((sizes, mut steps)) = rest.split_first_chunk::<6>() else {
        return;
    };
    let Some(machine) = PassedThrough::new(space, sizes) else {
        return;
    };
    while let Some(rest) = step(&machine, steps) {
        steps = rest;
    }
}

/// Makes one access, and returns the rest of the input.
fn step<'a>(machine: &PassedThrough, input: &'a [u8]) -> Option<&'a [u8]> {
    let ([kind, low, high, length], rest) = input.split_first_chunk()?;
    let length = usize::from(length % 17).min(rest.len());
    let (bytes, rest) = rest.split_at(length);
    let offset = u64::from(u16::from_le_bytes([*low, *high]));
    let (ports, memory) = (&machine.buses.ports, &machine.buses.memory);
    let mut data = bytes.to_vec();
    match kind % 8 {
        // Register of the configuration.
        0 | 1 => {
            select(machine, *low);
            _ = ports.write(DATA + u64::from(high % 4), bytes);
        }
        2 => {
            select(machine, *low);
            ports.read(DATA + u64::from(high % 4), &mut data);
        }
        3 => _ = ports.write(ADDRESS + offset % 8, bytes),
        // Each further kind names a BAR, or one of the two places of MSI-X.
        4 => memory.read(bar(machine, kind / 8).wrapping_add(offset), &mut data),
        5 => _ = memory.write(bar(machine, kind / 8).wrapping_add(offset), bytes),
        6 => memory.read(
            msix(machine, kind / 8).wrapping_add(offset % 256),
            &mut data,
        ),
        _ => _ = memory.write(msix(machine, kind / 8).wrapping_add(offset % 256), bytes),
    }
    Some(rest)
}

fn select(machine: &PassedThrough, register: u8) {
    let address = [register & 0xfc, SLOT << 3, 0, 0x80];
    _ = machine.buses.ports.write(ADDRESS, &address);
}

/// Returns the address at which the guest has a BAR now.
fn bar(machine: &PassedThrough, index: u8) -> u64 {
    let word = |register: u8| {
        let mut data = [0; 4];
        select(machine, register);
        machine.buses.ports.read(DATA, &mut data);
        u64::from(u32::from_le_bytes(data))
    };
    let index = index % 6;
    let low = word(0x10 + 4 * index);
    let high = match low & 6 == 4 && index < 5 {
        true => word(0x14 + 4 * index) << 32,
        false => 0,
    };
    high | low & !0xf
}

/// Returns an address shortly before the MSI-X table or the pending bits.
fn msix(machine: &PassedThrough, index: u8) -> u64 {
    let (region, offset) = machine.msix[usize::from(index % 2)];
    bar(machine, region).wrapping_add(offset).wrapping_sub(16)
}
