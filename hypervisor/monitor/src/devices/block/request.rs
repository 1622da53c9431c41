//! Parses and executes requests. A request consists of a header, data, and a status byte that the device writes
//! (virtio 1.2, 5.2.6).

use std::io::{self, Read};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, Reader};
use vm_memory::{Address, GuestMemoryBackend, VolatileSlice};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::device::{MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT_BYTES, MAX_SEGMENTS};
use super::image::{DiskAccess, DiskImage, SECTOR};
use super::ring::Part;
use crate::devices::virtio::slices;
use crate::ram::GuestRam;
use crate::sync::Ending;

/// `struct virtio_blk_req` up to its data.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(super) struct Header {
    pub kind: U32,
    pub reserved: U32,
    pub sector: U64,
}

/// `struct virtio_blk_discard_write_zeroes`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(super) struct Range {
    pub sector: U64,
    pub sectors: U32,
    pub flags: U32,
}

/// A status byte other than `VIRTIO_BLK_S_OK`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The request is invalid, or the host's I/O failed.
    Io,
    /// The device does not support the request.
    Unsupported,
}

impl Failure {
    fn status(self) -> u8 {
        byte(match self {
            Self::Io => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        })
    }
}

/// Most buffers of a read that is under way beside others: its data, and one for the status.
const MOST_BUFFERS: usize = MAX_SEGMENTS as usize + 1;
/// Most bytes of such a read. It bounds the time until all of them are finished. The kernel reads ahead of larger ones.
pub(super) const MOST_BYTES: u32 = 256 << 10;

/// A valid read that the disk has yet to execute.
#[derive(Debug)]
pub(super) struct ReadRequest {
    /// Offset in the image.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
    /// Memory of the data.
    pub parts: Vec<Part>,
    /// Buffers of the data and the status. The driver can change their descriptors meanwhile.
    buffers: Vec<Descriptor>,
}

/// State with which a disk executes requests.
#[derive(Debug)]
pub(super) struct Disk {
    pub image: DiskImage,
    /// Serial number that VIRTIO_BLK_T_GET_ID returns.
    pub serial: String,
    /// Whether each write must be durable when it completes, since the driver sends no flushes.
    pub write_through: bool,
    /// Once it has begun, requests fail.
    pub ending: Ending,
}

impl Disk {
    /// Executes the request in `chain` and writes its status. Returns the number of bytes written to the driver's
    /// buffers.
    pub fn serve(&self, memory: &GuestRam, chain: &DescriptorChain<&GuestRam>) -> u32 {
        // Without a status byte the result cannot be reported.
        let Some((data, status)) = room(memory, chain.clone().writable()) else {
            return 0;
        };
        let done = match &data {
            Some(data) => self.execute(memory, chain, data),
            None => Err(Failure::Io),
        };
        report(data.as_deref(), &status, done)
    }

    /// Returns the request in `chain` if it is a valid read that may be under way beside others.
    pub fn read_of(
        &self,
        memory: &GuestRam,
        chain: &DescriptorChain<&GuestRam>,
    ) -> Option<ReadRequest> {
        let mut reader = Reader::new(memory, chain.clone()).ok()?;
        let header: Header = read(&mut reader).ok()?;
        if header.kind.get() != VIRTIO_BLK_T_IN || self.ending.has_begun() {
            return None;
        }
        let mut writable = chain.clone().writable();
        let buffers: Vec<Descriptor> = writable.by_ref().take(MOST_BUFFERS).collect();
        // An indirect table has more buffers than the queue, although the device does not offer it.
        if writable.next().is_some() {
            return None;
        }
        let data = room(memory, buffers.iter().copied())?.0?;
        let (offset, len) = self.place(header.sector.get(), &data).ok()?;
        let len = u32::try_from(len).ok().filter(|len| *len <= MOST_BYTES)?;
        Some(ReadRequest {
            offset,
            len,
            parts: Part::of(&data),
            buffers,
        })
    }

    /// Reads what is left of a read after its first `done` bytes, and writes its status. Returns the number of bytes written
    /// to the driver's buffers.
    pub fn finish(&self, memory: &GuestRam, read: &ReadRequest, done: u32) -> u32 {
        let Some((data, status)) = room(memory, read.buffers.iter().copied()) else {
            return 0;
        };
        let finished = match &data {
            None => Err(Failure::Io),
            Some(_) if done >= read.len => Ok(()),
            Some(_) if self.ending.has_begun() => Err(Failure::Io),
            Some(data) => self.read_behind(data, read.offset, done),
        };
        report(data.as_deref(), &status, finished.map(|()| read.len))
    }

    /// Reads what belongs behind the first `done` bytes of `data`, whose place is `offset`.
    fn read_behind(
        &self,
        data: &[VolatileSlice<'_>],
        offset: u64,
        done: u32,
    ) -> Result<(), Failure> {
        let skipped = usize::try_from(done).map_err(|_| Failure::Io)?;
        let left = behind(data, skipped).ok_or(Failure::Io)?;
        self.image
            .read(&left, offset + u64::from(done))
            .map_err(failed)
    }

    /// Executes the request and returns the number of bytes written to `to_driver`.
    fn execute(
        &self,
        memory: &GuestRam,
        chain: &DescriptorChain<&GuestRam>,
        to_driver: &[VolatileSlice<'_>],
    ) -> Result<u32, Failure> {
        if self.ending.has_begun() {
            return Err(Failure::Io);
        }
        let mut reader = Reader::new(memory, chain.clone()).map_err(|_| Failure::Io)?;
        let header: Header = read(&mut reader)?;
        match header.kind.get() {
            VIRTIO_BLK_T_IN => {
                let (offset, len) = self.place(header.sector.get(), to_driver)?;
                self.image.read(to_driver, offset).map_err(failed)?;
                u32::try_from(len).map_err(|_| Failure::Io)
            }
            VIRTIO_BLK_T_OUT => {
                self.writable()?;
                let from_driver = slices(memory, chain.clone().readable()).ok_or(Failure::Io)?;
                let data = behind(&from_driver, size_of::<Header>()).ok_or(Failure::Io)?;
                let (offset, _) = self.place(header.sector.get(), &data)?;
                let written = self.image.write(&data, offset, self.write_through);
                written.map(|()| 0).map_err(failed)
            }
            VIRTIO_BLK_T_FLUSH => self.image.flush().map(|()| 0).map_err(failed),
            VIRTIO_BLK_T_GET_ID => self.identify(to_driver),
            VIRTIO_BLK_T_DISCARD => self.each_range(&mut reader, 0, |_, offset, len| {
                self.image.discard(offset, len).map_err(failed)
            }),
            VIRTIO_BLK_T_WRITE_ZEROES => {
                const UNMAP: u32 = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
                self.each_range(&mut reader, UNMAP, |range, offset, len| {
                    let is_over = || self.ending.has_begun();
                    let done = match range.flags.get() & UNMAP {
                        0 => self.image.write_zeroes(offset, len, is_over),
                        _ => self.image.unmap(offset, len, is_over),
                    };
                    done.map_err(failed)
                })
            }
            _ => Err(Failure::Unsupported),
        }
    }

    fn writable(&self) -> Result<(), Failure> {
        match self.image.access() {
            DiskAccess::ReadWrite => Ok(()),
            DiskAccess::ReadOnly => Err(Failure::Io),
        }
    }

    /// Returns the byte offset and the length of a transfer. Checks that it lies on the disk and observes the limits of
    /// the
    /// configuration.
    fn place(&self, sector: u64, data: &[VolatileSlice<'_>]) -> Result<(u64, u64), Failure> {
        if data
            .iter()
            .any(|part| part.len() > MAX_SEGMENT_BYTES as usize)
        {
            return Err(Failure::Io);
        }
        let len: u64 = data.iter().map(|part| part.len() as u64).sum();
        if len == 0 || !len.is_multiple_of(SECTOR) {
            return Err(Failure::Io);
        }
        Ok((self.offset(sector, len / SECTOR)?, len))
    }

    /// Returns the byte offset of `sectors` sectors. Checks that they lie on the disk.
    fn offset(&self, sector: u64, sectors: u64) -> Result<u64, Failure> {
        let end = sector.checked_add(sectors).ok_or(Failure::Io)?;
        if end > self.image.sectors() {
            return Err(Failure::Io);
        }
        // No overflow: file offsets are below 2^63.
        Ok(sector * SECTOR)
    }

    fn identify(&self, to_driver: &[VolatileSlice<'_>]) -> Result<u32, Failure> {
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        let named = self.serial.len().min(id.len());
        id[..named].copy_from_slice(&self.serial.as_bytes()[..named]);
        let room: usize = to_driver.iter().map(VolatileSlice::len).sum();
        if room < id.len() {
            return Err(Failure::Io);
        }
        let mut left = &id[..];
        for part in to_driver {
            let (now, later) = left.split_at(part.len().min(left.len()));
            part.copy_from(now);
            left = later;
        }
        Ok(VIRTIO_BLK_ID_BYTES)
    }

    /// Executes `operation` for each range of a discard or write-zeroes request, if all ranges lie on the disk and have
    /// none but these flags.
    fn each_range(
        &self,
        reader: &mut Reader<'_>,
        flags: u32,
        operation: impl Fn(&Range, u64, u64) -> Result<(), Failure>,
    ) -> Result<u32, Failure> {
        let bytes = reader.available_bytes();
        let count = bytes / size_of::<Range>();
        if count == 0 || !bytes.is_multiple_of(size_of::<Range>()) || count > MAX_RANGES as usize {
            return Err(Failure::Io);
        }
        let ranges = (0..count)
            .map(|_| read(reader))
            .collect::<Result<Vec<Range>, _>>()?;
        if ranges.iter().any(|range| range.flags.get() & !flags != 0) {
            return Err(Failure::Unsupported);
        }
        self.writable()?;
        let places = ranges.iter().map(|range| {
            let sectors = range.sectors.get();
            match sectors > MAX_RANGE_SECTORS {
                true => Err(Failure::Io),
                false => self.offset(range.sector.get(), sectors.into()),
            }
        });
        let places = places.collect::<Result<Vec<_>, _>>()?;
        for (range, offset) in ranges.iter().zip(places) {
            if self.ending.has_begun() {
                return Err(Failure::Io);
            }
            let sectors = range.sectors.get();
            if sectors > 0 {
                operation(range, offset, u64::from(sectors) * SECTOR)?;
            }
        }
        if self.write_through {
            self.image.flush().map_err(failed)?;
        }
        Ok(0)
    }
}

/// Translates an error of the host's storage to the status for the guest.
fn failed(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::Unsupported => Failure::Unsupported,
        // The guest ends.
        io::ErrorKind::Interrupted => Failure::Io,
        _ => {
            tracing::warn!(%error, "the host fails a request of a guest's disk");
            Failure::Io
        }
    }
}

fn read<T: FromZeros + FromBytes + IntoBytes>(reader: &mut Reader<'_>) -> Result<T, Failure> {
    let mut value = T::new_zeroed();
    reader
        .read_exact(value.as_mut_bytes())
        .map_err(|_| Failure::Io)?;
    Ok(value)
}

fn byte(status: u32) -> u8 {
    status.to_le_bytes()[0]
}

/// Memory of a request's data; `None` if a part of it is not RAM, such as memory of the window.
type Data<'m> = Option<Vec<VolatileSlice<'m>>>;

/// Returns the memory of the data, and of the status: the last byte of the buffers. `None` if there is no such byte, or if it
/// is not RAM. The driver may not have initialized it, so that it is written whatever the rest of the buffers is.
fn room<'m>(
    memory: &'m GuestRam,
    buffers: impl Iterator<Item = Descriptor>,
) -> Option<(Data<'m>, VolatileSlice<'m>)> {
    let mut last = None;
    let mut buffers = buffers.inspect(|buffer| {
        if buffer.len() > 0 {
            last = Some((buffer.addr(), u64::from(buffer.len()) - 1));
        }
    });
    let data = slices(memory, buffers.by_ref());
    buffers.for_each(drop);
    let (start, before) = last?;
    let status = memory.get_slice(start.checked_add(before)?, 1).ok()?;
    let data = data.map(|mut data| {
        take_last_byte(&mut data);
        data
    });
    Some((data, status))
}

/// Writes the status of a request that has written to `data`. Returns the number of bytes written to the driver's buffers.
fn report(
    data: Option<&[VolatileSlice<'_>]>,
    status: &VolatileSlice<'_>,
    done: Result<u32, Failure>,
) -> u32 {
    if let Err(failure) = done {
        tracing::debug!(?failure, "a disk refuses a request");
    }
    let value = done.map_or_else(Failure::status, |_| byte(VIRTIO_BLK_S_OK));
    status.copy_from(&[value]);
    // The driver may read as many bytes from the first buffer on. The status is one of them if nothing that was not
    // written lies before it.
    let written = done.unwrap_or(0);
    let room = data.map(|data| data.iter().map(|part| part.len() as u64).sum::<u64>());
    match room == Some(u64::from(written)) {
        true => written.saturating_add(1),
        false => written,
    }
}

/// Removes the last byte of the slices.
fn take_last_byte(slices: &mut Vec<VolatileSlice<'_>>) {
    while let Some(last) = slices.pop() {
        let Some(before) = last.len().checked_sub(1) else {
            continue;
        };
        if let Ok(rest) = last.subslice(0, before)
            && before > 0
        {
            slices.push(rest);
        }
        return;
    }
}

/// Returns the slices without their first `skipped` bytes; `None` if there are fewer.
fn behind<'m>(slices: &[VolatileSlice<'m>], mut skipped: usize) -> Option<Vec<VolatileSlice<'m>>> {
    let mut rest = Vec::with_capacity(slices.len());
    for slice in slices {
        let here = skipped.min(slice.len());
        skipped -= here;
        if here < slice.len() {
            rest.push(slice.offset(here).ok()?);
        }
    }
    (skipped == 0).then_some(rest)
}
