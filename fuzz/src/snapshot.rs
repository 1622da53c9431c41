//! Restores the devices of a VM from the state in a snapshot, and goes on as its guest: reads the registers, notifies the
//! queues, and resets the devices.

use wormhole_monitor::VmState;
use wormhole_monitor::fuzzing::Machine;

/// Ports of configuration mechanism 1: address and data.
const ADDRESS: u64 = 0xcf8;
const DATA: u64 = 0xcfc;
/// Register of BAR 0 in configuration space.
const BAR: u8 = 0x10;
/// Offsets of the BAR's structures: registers, with the status, and notifications of four bytes a queue.
const STATUS: u64 = 0x14;
const NOTIFY: u64 = 0x3000;
const REGIONS: [u64; 6] = [0, 0x1000, 0x2000, NOTIFY, 0x4000, 0x5000];

pub fn run(text: &[u8]) {
    let Ok(state) = serde_json::from_slice::<VmState>(text) else {
        return;
    };
    let machine = Machine::new();
    if machine.restore(&state).is_err() {
        return;
    }
    for device in (1..).take(Machine::DEVICES) {
        let mut bar = [0; 4];
        let address = [BAR, device << 3, 0, 0x80];
        _ = machine.buses.ports.write(ADDRESS, &address);
        machine.buses.ports.read(DATA, &mut bar);
        let bar = u64::from(u32::from_le_bytes(bar) & !0xf);
        for region in REGIONS {
            machine.buses.memory.read(bar + region, &mut [0; 0x38]);
        }
        for queue in 0..4 {
            let notification = bar + NOTIFY + 4 * queue;
            _ = machine.buses.memory.write(notification, &[0; 2]);
        }
        _ = machine.buses.memory.write(bar + STATUS, &[0]);
    }
}
