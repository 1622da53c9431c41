//! Works on the queues of a virtio device with a hostile driver, and on its streams as hostile hosts.
//!
//! The input names the device and lists steps: a byte for the step, then its arguments. Steps that write a descriptor,
//! a head or a packet as a driver would let short inputs get far; the first step writes anything anywhere.

use std::io::{Read, Write};

use wormhole_monitor::devices::vsock::{HOST_CID, Header};
use wormhole_monitor::fuzzing::{GUEST_CID, Served};
use zerocopy::IntoBytes;

use crate::Steps;

/// Address of packets and buffers.
const BUFFERS: u64 = 0x8000;
/// Greatest number of open streams of the host; others are closed.
const STREAMS: usize = 8;

pub fn run(input: &[u8]) {
    let mut steps = Steps(input);
    let Some([device]) = steps.next() else { return };
    let mut served = match device % 10 {
        0 => Served::rng(),
        4 => Served::balloon(),
        1 | 5 => Served::block(),
        6 => Served::net(),
        7 => Served::fs(),
        8 => Served::console(),
        9 => Served::net_stream(),
        2 => Served::attached_vsock(),
        _ => Served::vsock(),
    };
    let mut streams = Vec::new();
    while step(&mut steps, &mut served, &mut streams).is_some() {
        streams.extend(served.streams.try_iter());
        streams.truncate(STREAMS);
    }
}

fn step(
    steps: &mut Steps<'_>,
    served: &mut Served,
    streams: &mut Vec<std::os::unix::net::UnixStream>,
) -> Option<()> {
    let [step] = steps.next()?;
    let queue_of = |number: u8, served: &Served| usize::from(number) % served.queues();
    match step % 12 {
        0 => {
            let [low, middle, high, length] = steps.next()?;
            let at = u64::from(u32::from_le_bytes([low, middle, high, 0]));
            let bytes = steps.take(length.into());
            served.write(at % Served::RAM as u64, bytes);
        }
        // Descriptor: most addresses are in the buffers.
        1 => {
            let [queue, index, a0, a1, a2, l0, l1, l2, flags, next] = steps.next()?;
            let queue = queue_of(queue, served);
            let index = u64::from(index) % u64::from(served.size(queue));
            let mut bytes = [0; 16];
            let address = u64::from(u32::from_le_bytes([a0, a1, a2, 0]));
            let address = if a2 & 0x80 != 0 {
                address
            } else {
                BUFFERS + address % 0x1_8000
            };
            bytes[..8].copy_from_slice(&address.to_le_bytes());
            bytes[8..12].copy_from_slice(&[l0, l1, l2 & 1, 0]);
            bytes[12] = flags;
            bytes[14] = next;
            served.write(Served::rings(queue)[0] + 16 * index, &bytes);
        }
        // Head, made available.
        2 => {
            let [queue, head] = steps.next()?;
            let queue = queue_of(queue, served);
            let ring = Served::rings(queue)[1];
            let index = served.read(ring + 2);
            let slot = u64::from(index % served.size(queue));
            served.write(ring + 4 + 2 * slot, &u16::from(head).to_le_bytes());
            served.write(ring + 2, &index.wrapping_add(1).to_le_bytes());
        }
        // Packet of vsock.
        3 => {
            let [place, op, guest, host, low, high, flags, kind, room, taken] = steps.next()?;
            let header = Header {
                src_cid: GUEST_CID.into(),
                dst_cid: HOST_CID.into(),
                src_port: u32::from(guest % 16).into(),
                dst_port: u32::from(host % 4).into(),
                len: u32::from(u16::from_le_bytes([low, high])).into(),
                kind: if kind == 0xff { 2 } else { 1 }.into(),
                op: u16::from(op % 10).into(),
                flags: u32::from(flags).into(),
                buf_alloc: (u32::from(room) << 10).into(),
                fwd_cnt: u32::from(taken).into(),
            };
            served.write(BUFFERS + 64 * u64::from(place), header.as_bytes());
        }
        4 => {
            let [queue] = steps.next()?;
            served.notify(queue_of(queue, served));
        }
        5 => served.turn(),
        // A host writes, reads, closes, or sends a frame behind its length, as passt does.
        6..=9 => {
            let [stream, count] = steps.next()?;
            let index = usize::from(stream);
            if index < streams.len() {
                match step % 12 {
                    6 => _ = streams[index].write(&vec![count; usize::from(count) << 4]),
                    7 => _ = streams[index].read(&mut vec![0; usize::from(count) << 4]),
                    9 => {
                        let mut frame = u32::from(count).to_be_bytes().to_vec();
                        frame.resize(4 + usize::from(count), count);
                        _ = streams[index].write(&frame);
                    }
                    _ => drop(streams.swap_remove(index)),
                }
            }
        }
        10 => {
            let [features] = steps.next()?;
            served.restart(u64::from(features) << 8);
        }
        // Header of a request to a disk.
        _ => {
            let [place, kind, sector] = steps.next()?;
            let mut header = [0; 16];
            header[0] = kind % 16;
            header[8] = sector;
            served.write(BUFFERS + 64 * u64::from(place), &header);
        }
    }
    Some(())
}
