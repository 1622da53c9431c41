//! Memory that streams have freed to pools, for the next allocations of the same streams.
//!
//! A stream that allocates as much as it has just freed gets the same memory without a message, as the order of the
//! stream permits (CUDA driver API, `cuMemFreeAsync`). The frontend sends the free to the worker later: before the stream
//! allocates another size, waits or is destroyed, and before the program counts, trims or destroys the pool.

use wormhole_api::handle::{Pool, Stream};
use wormhole_api::{DevicePtr, Handle, PoolFree};
use wormhole_lock::Mutex;

use crate::error::Result;
use crate::object::context::{self, Scope};
use crate::object::stream::{self, Target};
use crate::session::Session;

/// Most blocks of the process, so that a look at all of them is short.
const MOST: usize = 64;
/// Most bytes of all blocks. Only their own streams can allocate this memory.
const MOST_BYTES: u64 = 256 << 20;

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
    BLOCKS.lock().add(Block {
        pool,
        stream: target.handle,
        context: scope.context,
        bytes,
        address,
        work: target.work(),
        legacy_work: stream::legacy(scope).work(),
    })
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

/// Frees blocks in the worker, each in the order of its stream. Returns the stream of each block, and whether it was idle
/// before.
fn free(
    session: &'static Session,
    wanted: impl Fn(&Block) -> bool,
) -> Result<Vec<(Scope, Target, bool)>> {
    // Held until all messages are in the ring, so that no stream is destroyed between.
    let mut blocks = BLOCKS.lock();
    let found: Vec<Block> = std::iter::from_fn(|| blocks.take(&wanted)).collect();
    let freed = found.into_iter().map(|block| {
        let scope = context::scope_numbered(session, block.context);
        let target = block.target(scope);
        let was_idle = target.is_idle();
        let message = PoolFree {
            address: DevicePtr(block.address),
            stream: target.handle,
        };
        scope.session.record(&message)?;
        Ok((scope, target, was_idle))
    });
    let freed = freed.collect::<Result<Vec<_>>>()?;
    drop(blocks);
    // Without the lock, since a stream with much work waits here.
    for (scope, target, _) in &freed {
        target.worked(*scope)?;
    }
    Ok(freed)
}

/// Frees the blocks of the scope's device whose streams are `due`, and those that are freed in the order of their
/// streams now. Any other block stays: its free would come after later work, and a stream that waits for the free
/// would wait for that work too.
pub fn free_in_order(scope: Scope, due: impl Fn(Handle<Stream>) -> bool) -> Result {
    let session = scope.session.session();
    let is_wanted = |block: &Block| {
        let owner = context::scope_numbered(session, block.context);
        owner.session.ordinal() == scope.session.ordinal()
            && (due(block.stream) || block.is_last(owner))
    };
    free(session, is_wanted).map(drop)
}

/// Frees the blocks of a pool, whose memory the program counts, trims or destroys. Waits for streams that are idle, so
/// that the pool has the memory.
pub fn free_of_pool(scope: Scope, pool: Handle<Pool>) -> Result {
    let freed = free(scope.session.session(), |block| block.pool == pool)?;
    freed
        .into_iter()
        .filter(|(_, _, was_idle)| *was_idle)
        .try_for_each(|(scope, target, _)| target.synchronize(scope))
}

/// Frees the blocks of a stream, which is to be destroyed.
pub fn free_of_stream(session: &'static Session, stream: Handle<Stream>) -> Result {
    free(session, |block| block.stream == stream).map(drop)
}

/// Frees all blocks. Returns false if there are none.
pub fn free_all(session: &'static Session) -> Result<bool> {
    free(session, |_| true).map(|freed| !freed.is_empty())
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
