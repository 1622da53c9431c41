//! Mirrors: the contents of managed memory when guest and device last agreed.
//!
//! A mirror is memory of the device as large as placed memory, with the contents of each part as of the last moment at which
//! home and device were equal: its last fetch, push or refresh while the device was idle. A refresh compares the device's
//! memory with its mirror, on the device, and copies to the home what differs. A guest that has not fetched or pushed a part
//! since the mirror was made learns nothing of that part but what other memory of its own was equal.

use std::sync::Arc;

use wormhole_api::{
    CuResult, ManagedMirror, ManagedRefresh, ManagedRefreshReply, Outcome, Serve, Served,
};
use wormhole_device::{Comparison, Device};
use wormhole_link::counters::Counter;

use super::{CopyStream, Part, copy, on};
use crate::session::addresses::admitted;
use crate::session::{Answer, Call, Session};

impl Serve<ManagedMirror> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedMirror) -> Outcome<()> {
        let address = message.address.0;
        let managed = self.placements.at(address);
        let Some(managed) = managed.filter(|managed| managed.placed) else {
            return Err(self.addresses.refused());
        };
        let device = managed.device.clone();
        let whole = managed.bytes + Comparison::marks_of(managed.bytes);
        if message.wanted == 0 {
            let Some(mirror) = managed.mirror.take() else {
                return Ok(Served::Done(()));
            };
            self.addresses.device.remove(mirror);
            return self.free(call, device, move |device| device.mem_free(mirror));
        }
        if managed.mirror.is_some() {
            return Err(self.addresses.refused());
        }
        // Until the answer nothing else is done to the memory.
        let users = Arc::clone(&managed.users);
        let number = device.number();
        self.ask_for_memory(
            call,
            device,
            move |device| {
                let mirror = device.mem_alloc(whole)?;
                admitted(mirror, whole, |mirror| device.mem_free(mirror))
            },
            move |session, mirror| {
                drop(users);
                if !session.addresses.device.insert_of(number, mirror, whole) {
                    tracing::error!("the device gave out {whole} bytes at {mirror:#x} twice");
                    return Answer::failed(CuResult::UNKNOWN);
                }
                if let Some(managed) = session.placements.all.get_mut(&address) {
                    managed.mirror = Some(mirror);
                }
                Answer::done()
            },
        )
    }
}

impl Serve<ManagedRefresh> for Session {
    fn serve(&mut self, call: &Call, message: &ManagedRefresh) -> Outcome<ManagedRefreshReply> {
        let (address, bytes, most) = (message.address.0, message.bytes, message.most);
        let whole = [address, bytes]
            .iter()
            .all(|value| value.is_multiple_of(Comparison::PART));
        let part = self.placements.part(address, bytes);
        let (true, Some(part)) = (whole, part) else {
            return Err(self.addresses.refused());
        };
        let Some(mirror) = part.mirror else {
            return Err(self.addresses.refused());
        };
        self.all_idle(&self.here(call))?;
        let stream = Arc::clone(&self.placements.stream);
        let device = part.device.clone();
        self.ask(
            call,
            device,
            move |device| refresh(device, &stream, (&part, mirror), (address, bytes), most),
            |session, copied| {
                session
                    .counters
                    .add(Counter::BytesToHost, copied.unwrap_or(0));
                Answer::reply(&ManagedRefreshReply {
                    current: copied.is_some().into(),
                })
            },
        )
    }
}

/// Copies the parts that differ from the mirror to the home and to the mirror, unless they have more than `most` bytes, and
/// returns their bytes.
fn refresh(
    device: &dyn Device,
    stream: &CopyStream,
    (part, mirror): (&Part, u64),
    (address, bytes): (u64, u64),
    most: u64,
) -> wormhole_device::Result<Option<u64>> {
    let comparison = Comparison {
        ranges: [address, mirror],
        bytes,
        marks: part.marks,
    };
    let differing = device.differing(&comparison, on(device, stream)?)?;
    let count = differing.iter().filter(|differs| **differs).count() as u64;
    let changed = count * Comparison::PART;
    if changed > most {
        return Ok(None);
    }
    for (index, _) in (0..).zip(&differing).filter(|(_, differs)| **differs) {
        let offset = index * Comparison::PART;
        let from = address + offset;
        copy(device, stream, part.home + offset, from, Comparison::PART)?;
        copy(device, stream, mirror + offset, from, Comparison::PART)?;
    }
    Ok(Some(changed))
}
