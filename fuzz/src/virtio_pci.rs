//! Accesses ports and memory of the PCI bus and its virtio devices as a hostile guest: configuration, moves of the
//! BARs, registers of the transport, the vectors' table, notifications.
//!
//! The input is a list of accesses. A device and an offset name an address in a BAR, wherever the guest has moved the
//! BAR.

use vm_memory::{Bytes, GuestAddress};
use wormhole_monitor::fuzzing::Machine;

/// Ports of configuration mechanism 1: address and data.
const ADDRESS: u64 = 0xcf8;
const DATA: u64 = 0xcfc;
/// Register of BAR 0 in configuration space.
const BAR: u8 = 0x10;

pub fn run(input: &[u8]) {
    let machine = Machine::new();
    let mut steps = input;
    while let Some(rest) = step(&machine, steps) {
        steps = rest;
    }
}

/// Makes one access, and returns the rest of the input.
fn step<'a>(machine: &Machine, input: &'a [u8]) -> Option<&'a [u8]> {
    let ([kind, device, low, high, length], rest) = input.split_first_chunk()?;
    let length = usize::from(length % 17).min(rest.len());
    let (bytes, rest) = rest.split_at(length);
    let offset = u64::from(u16::from_le_bytes([*low, *high]));
    let device = usize::from(*device) % (Machine::DEVICES + 1);
    let device = u8::try_from(1 + device).expect("few devices");
    let mut data = bytes.to_vec();
    match kind % 8 {
        // Any access to the ports.
        0 => _ = machine.buses.ports.write(ADDRESS + offset % 8, bytes),
        1 => machine.buses.ports.read(ADDRESS + offset % 8, &mut data),
        // Register of a device's configuration.
        2 => {
            select(machine, device, *low);
            _ = machine.buses.ports.write(DATA + u64::from(high % 4), bytes);
        }
        3 => {
            select(machine, device, *low);
            machine
                .buses
                .ports
                .read(DATA + u64::from(high % 4), &mut data);
        }
        4 | 5 => {
            _ = machine
                .buses
                .memory
                .write(bar(machine, device) + offset, bytes)
        }
        6 => machine
            .buses
            .memory
            .read(bar(machine, device) + offset, &mut data),
        // Contents of the queues.
        _ => _ = machine.ram.write_slice(bytes, GuestAddress(offset)),
    }
    Some(rest)
}

fn select(machine: &Machine, device: u8, register: u8) {
    let address = [register & 0xfc, device << 3, 0, 0x80];
    _ = machine.buses.ports.write(ADDRESS, &address);
}

fn bar(machine: &Machine, device: u8) -> u64 {
    let mut data = [0; 4];
    select(machine, device, BAR);
    machine.buses.ports.read(DATA, &mut data);
    u64::from(u32::from_le_bytes(data) & !0xf)
}
