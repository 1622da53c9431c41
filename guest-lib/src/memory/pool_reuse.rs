//! Memory that streams have freed to pools, for the next allocations of the same streams.
//!
//! A stream that allocates as much as it has just freed gets the same memory without a message, as the order of the
//! stream permits (CUDA driver API, `cuMemFreeAsync`). The frontend sends the free to the worker later: before the stream
//! is destroyed, before the program counts, trims or destroys the pool or asks how much memory is free, when the device has
//! none left, and, if it is much, before the stream allocates another size or waits. The pool would release it at a wait,
//! and take some 50 µs for that and for the next allocation.

use wormhole_api::handle::{Pool, Stream};
use wormhole_api::{DevicePtr, Handle, PoolFree};
use wormhole_lock::Mutex;

use crate::error::Result;
use crate::memory::pool;
use crate::object::context::{self, Scope};
use crate::object::stream::{self, Target};
use crate::session::Session;

/// Most blocks of the process, so that a look at all of them is short.
const MOST: usize = 64;
/// Most bytes of all blocks. Only their own streams can allocate this memory.
const MOST_BYTES: u64 = 256 << 20;
/// Most bytes of all blocks that stay while streams wait.
const KEPT_BYTES: u64 = 32 << 20;

/// A block of memory that was freed in the order of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    pool: Handle<Pool>,
    stream: Handle<Stream>,
    /// Number of the context in which the memory was freed. The legacy streams of all devices have one handle.
    context: u32,
    bytes: u64,
    address: u64,
    /// Work of the stream before the free.
    work: u64,
    /// Work of the device's legacy stream before the free.
    legacy_work: u64,
}

/// All blocks, the last one freed at the end.
static BLOCKS: Mutex<Blocks> = Mutex::new(Blocks::NEW);

#[derive(Debug)]
struct Blocks {
    held: [Option<Block>; MOST],
    count: usize,
    bytes: u64,
}

impl Blocks {
    const NEW: Self = Self {
        held: [None; MOST],
        count: 0,
        bytes: 0,
    };

    /// Adds a block. Returns false if there is no room for it.
    fn add(&mut self, block: Block) -> bool {
        let bytes = self.bytes.saturating_add(block.bytes);
        match self.held.get_mut(self.count) {
            Some(place) if bytes <= MOST_BYTES => *place = Some(block),
            _ => return false,
        }
        self.count += 1;
        self.bytes = bytes;
        true
    }

    fn is_much(&self) -> bool {
        self.bytes > KEPT_BYTES
    }

    /// Removes the last block that `wanted` accepts.
    fn take(&mut self, wanted: impl Fn(&Block) -> bool) -> Option<Block> {
        let held = &mut self.held[..self.count];
        let found = held
            .iter()
            .rposition(|block| block.is_some_and(|block| wanted(&block)))?;
        let block = held[found].take()?;
        held[found..].rotate_left(1);
        self.count -= 1;
        self.bytes -= block.bytes;
        Some(block)
    }
}

/// Stores memory that a stream frees, for [`take`]. Returns false if it has to be freed in the worker.
pub fn store(scope: Scope, target: Target, pool: Handle<Pool>, address: u64, bytes: u64) -> bool {
    let block = Block {
        pool,
        stream: target.handle,
        context: scope.context,
        bytes,
        address,
        work: target.work(),
        legacy_work: stream::legacy(scope).work(),
    };
    let mut blocks = BLOCKS.lock();
    let (stored, is_much) = (blocks.add(block), blocks.is_much());
    drop(blocks);
    if stored && is_much {
        pool::freed_to(pool, Some(target.handle));
    }
    stored
}

/// Returns whether the blocks are more than may stay while streams wait.
pub fn is_much() -> bool {
    BLOCKS.lock().is_much()
}

/// Returns memory of this size that the stream has freed to the pool.
pub fn take(scope: Scope, target: Target, pool: Handle<Pool>, bytes: u64) -> Option<u64> {
    let fits = |block: &Block| {
        block.bytes == bytes
            && block.pool == pool
            && block.stream == target.handle
            && block.context == scope.context
    };
    BLOCKS.lock().take(fits).map(|block| block.address)
}

/// A block that is freed in the worker.
struct Freed {
    scope: Scope,
    stream: Target,
    /// Whether the stream was idle before.
    was_idle: bool,
}

/// Frees blocks in the worker, each in the order of its stream, and notes that.
fn free(session: &'static Session, wanted: impl Fn(&Block) -> bool) -> Result<Vec<Freed>> {
    // Held until all messages are in the ring, so that no stream is destroyed between.
    let mut blocks = BLOCKS.lock();
    let found: Vec<Block> = std::iter::from_fn(|| blocks.take(&wanted)).collect();
    let freed = found.into_iter().map(|block| {
        let scope = context::scope_numbered(session, block.context);
        let stream = block.target(scope);
        let was_idle = stream.is_idle();
        let message = PoolFree {
            address: DevicePtr(block.address),
            stream: stream.handle,
        };
        scope.session.record(&message)?;
        pool::freed_to(block.pool, Some(stream.handle));
        Ok(Freed {
            scope,
            stream,
            was_idle,
        })
    });
    let freed = freed.collect::<Result<Vec<_>>>()?;
    drop(blocks);
    // Without the lock, since a stream with much work waits here.
    for freed in &freed {
        freed.stream.worked(freed.scope)?;
    }
    Ok(freed)
}

/// Frees the blocks of the scope's device whose streams are `due`, and those that are freed in the order of their
/// streams now. Any other block stays: its free would come after later work, and a stream that waits for the free
/// would wait for that work too.
pub fn free_in_order(scope: Scope, due: impl Fn(Handle<Stream>) -> bool) -> Result {
    free_due(scope, due).map(drop)
}

fn free_due(scope: Scope, due: impl Fn(Handle<Stream>) -> bool) -> Result<Vec<Freed>> {
    let session = scope.session.session();
    free(session, |block| {
        let owner = context::scope_numbered(session, block.context);
        owner.session.ordinal() == scope.session.ordinal()
            && (due(block.stream) || block.is_last(owner))
    })
}

/// Frees the blocks of the scope's device that are freed in the order of their streams now, and has pools release their
/// memory.
pub fn release_idle(scope: Scope) -> Result {
    synchronize(free_due(scope, |_| false)?)
}

/// Frees the blocks of a pool, whose memory the program counts, trims or destroys. Waits for streams that are idle, so
/// that the pool has the memory.
pub fn free_of_pool(scope: Scope, pool: Handle<Pool>) -> Result {
    synchronize(free(scope.session.session(), |block| block.pool == pool)?)
}

/// Waits for the streams that were idle before they freed memory. At that the pools release what exceeds their thresholds.
fn synchronize(mut freed: Vec<Freed>) -> Result {
    freed.retain(|freed| freed.was_idle);
    let of = |freed: &Freed| (freed.scope.context, freed.stream.handle.to_wire());
    freed.sort_unstable_by_key(of);
    freed.dedup_by_key(|freed| of(freed));
    freed
        .into_iter()
        .try_for_each(|freed| freed.stream.synchronize(freed.scope))
}

/// Frees the blocks of a stream, which is to be destroyed.
pub fn free_of_stream(session: &'static Session, stream: Handle<Stream>) -> Result {
    free(session, |block| block.stream == stream).map(drop)
}

/// Frees all blocks.
pub fn free_all(session: &'static Session) -> Result {
    free(session, |_| true).map(drop)
}

/// Frees all blocks, and has pools release their memory. Returns false if there are none.
pub fn release_all(session: &'static Session) -> Result<bool> {
    let freed = free(session, |_| true)?;
    let any = !freed.is_empty();
    synchronize(freed)?;
    Ok(any)
}

impl Block {
    /// Returns the stream. A stream that the program destroyed while it freed memory leaves it to the legacy stream.
    fn target(&self, owner: Scope) -> Target {
        stream::existing(self.stream).unwrap_or_else(|_| stream::legacy(owner))
    }

    /// Returns whether no work that the stream waits for came after the free, or all of it is complete.
    fn is_last(&self, owner: Scope) -> bool {
        let (target, legacy) = (self.target(owner), stream::legacy(owner));
        let is_last = |target: Target, work| target.work() == work || target.is_idle();
        is_last(target, self.work)
            && is_last(legacy, self.legacy_work)
            && (!target.handle.is_legacy() || stream::is_alone(owner))
    }
}

#[cfg(test)]
mod tests {
    use wormhole_api::handle::Key;

    use super::*;

    fn block(bytes: u64, address: u64) -> Block {
        let key = Key {
            index: 2,
            generation: 1,
        };
        Block {
            pool: Handle::new(key).unwrap(),
            stream: Handle::new(key).unwrap(),
            context: 0,
            bytes,
            address,
            work: 0,
            legacy_work: 0,
        }
    }

    #[test]
    fn the_block_freed_last_is_taken_first_and_once() {
        let mut blocks = Blocks::NEW;
        for (bytes, address) in [(64, 1), (32, 2), (64, 3), (32, 4)] {
            assert!(blocks.add(block(bytes, address)));
        }
        let mut take = |bytes| {
            let found = blocks.take(|block| block.bytes == bytes);
            found.map(|block| block.address)
        };
        assert_eq!(take(64), Some(3));
        assert_eq!(take(32), Some(4));
        assert_eq!(take(64), Some(1));
        assert_eq!((take(64), take(48)), (None, None));
        assert_eq!(take(32), Some(2));
        assert_eq!((blocks.count, blocks.bytes), (0, 0));
    }

    #[test]
    fn neither_more_blocks_nor_more_bytes_are_held() {
        let mut blocks = Blocks::NEW;
        assert!(!blocks.add(block(MOST_BYTES + 1, 1)));
        assert!(blocks.add(block(MOST_BYTES, 1)));
        assert!(!blocks.add(block(1, 2)));
        assert!(blocks.take(|_| true).is_some());
        for at in 0..MOST as u64 {
            assert!(blocks.add(block(1, at)));
        }
        assert!(!blocks.add(block(1, 0)));
    }
}
