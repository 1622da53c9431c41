//! Valid records of interprocess sharing.

use wormhole_api::{
    CloseAllocation, DevicePtr, FileMap, FileUnmap, OpenAllocation, OpenEvent, OpenMemory,
    OpenPointer, OpenPool, ShareAddress, ShareEvent, ShareMemory, SharePool, SharedAddress,
    SharedEventCreate,
};
use wormhole_ring::layout::FILES;

use crate::attack::Entry;
use crate::grammar::{Things, entry};
use crate::guest::Guest;

/// Returns records that share every kind of object, and open tokens that were never issued.
pub fn sharing(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        event,
        pool,
        memory,
        device,
        ..
    } = *things;
    let token = [0x5A; 16];
    vec![
        entry(&ShareAddress {
            address: device,
            what: SharedAddress::Allocation,
        }),
        entry(&OpenAllocation { token }),
        entry(&CloseAllocation { address: device }),
        entry(&ShareEvent { event }),
        entry(&SharedEventCreate { new: event }),
        entry(&OpenEvent {
            new: guest.mint(),
            token,
        }),
        entry(&ShareMemory { memory }),
        entry(&OpenMemory {
            new: guest.mint(),
            token,
        }),
        entry(&SharePool { pool }),
        entry(&OpenPool {
            new: guest.mint(),
            token,
        }),
        entry(&OpenPointer { pool, token }),
        entry(&FileMap {
            address: DevicePtr(FILES.0),
            offset: 0,
            bytes: 4096,
        }),
        entry(&FileUnmap {
            address: DevicePtr(FILES.0),
        }),
    ]
}
