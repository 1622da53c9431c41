//! Host functions: one thread of this library calls them in stream order.
//!
//! A fence signals that the work before a function is complete. The thread then calls the function and writes a word of
//! the arena. The stream waits for that word, so the work behind the function starts after it. A function that never
//! returns holds up only the program's own streams.
//!
//! The value of a word only grows, so a word may serve the next function before a stream has read its last value.
//!
//! A function that is a node of a graph has two words of its own: the graph sets `ready` when the node is due, waits
//! for `done`, and then clears `done`.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;

use wormhole_api::{CuResult, Fence, MemoryOperation};
use wormhole_lock::{Condvar, Mutex, MutexGuard};
use wormhole_ring::arena::PAGE;
use wormhole_ring::waits::Wait;

use crate::error::{CuError, Result};
use crate::log;
use crate::object::context::{self, Scope};
use crate::object::stream::Target;
use crate::session::{Session, gate};
use crate::signals::spawn_quiet;
use crate::types::{CUhostFn, CUstream, CUstreamCallback};
use crate::work::copy3d::{self, Place};
use crate::work::mem_ops::{self, Word};

/// The function to call.
#[derive(Clone, Copy, Debug)]
pub enum Function {
    /// Function of `cuLaunchHostFunc`, which is not called after a fault.
    Plain {
        function: CUhostFn,
        data: *mut c_void,
    },
    /// Function of `cuStreamAddCallback`, which gets the error of a fault.
    Callback {
        function: CUstreamCallback,
        stream: CUstream,
        data: *mut c_void,
    },
    /// Copy of a graph between the program's memory and the arena.
    Rows {
        to: Place,
        from: Place,
        extent: [u64; 3],
    },
    /// Function of a disabled node.
    Nothing,
}

// SAFETY: the pointers belong to the program, which passes them for a call of its function on another thread.
unsafe impl Send for Function {}

impl Function {
    fn call(self, result: CuResult) {
        match self {
            Self::Plain {
                function: Some(function),
                data,
            } if result == CuResult::SUCCESS => {
                // SAFETY: the program asked for this call.
                unsafe { function(data) };
            }
            Self::Callback {
                function: Some(function),
                stream,
                data,
            } => {
                // SAFETY: as above.
                unsafe { function(stream, result.0, data) };
            }
            Self::Rows { to, from, extent } if result == CuResult::SUCCESS => {
                // SAFETY: the graph keeps the arena allocated, and the program vouches for its own memory.
                unsafe { copy3d::copy_rows(&to, &from, extent) };
            }
            _ => {}
        }
    }
}

/// Words that signal the start and the end of a function.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Stream {
        /// Fence that is written when the work before the function is complete.
        ready: (Fence, u64),
        /// Word and value for which the stream waits.
        done: Done,
    },
    Node(NodeWords),
}

/// A function that waits for its call.
struct Pending {
    turn: Turn,
    function: Function,
}

/// The two words of a node.
#[derive(Clone, Copy, Debug)]
pub struct NodeWords {
    ready: Word,
    done: Word,
}

impl NodeWords {
    pub fn take(scope: Scope) -> Result<Self> {
        start(scope.session.session())?;
        if let Some(free) = queue().free_nodes.pop() {
            return Ok(free);
        }
        let words = take_page(scope)?;
        let pairs = words.chunks_exact(2).map(|pair| Self {
            ready: pair[0],
            done: pair[1],
        });
        let mut queue = queue();
        queue.free_nodes.extend(pairs);
        queue.free_nodes.pop().ok_or(CuError::UNKNOWN)
    }

    /// Frees the words, which no launch uses any more.
    pub fn give_back(self) {
        for word in [self.ready, self.done] {
            word.get().store(0, Ordering::Relaxed);
        }
        queue().free_nodes.push(self);
    }

    /// Returns the memory operations of the graph in place of the node.
    pub fn operations(self) -> [MemoryOperation; 3] {
        let operation = |kind, word: Word, value| MemoryOperation {
            kind,
            flags: mem_ops::GEQ,
            address: word.address(),
            value,
        };
        [
            operation(mem_ops::WRITE_64, self.ready, 1),
            operation(mem_ops::WAIT_64, self.done, 1),
            operation(mem_ops::WRITE_64, self.done, 0),
        ]
    }
}

/// Queues a function for its node in the launch that follows.
pub fn expect(words: NodeWords, function: Function) {
    queue().pending.push_back(Pending {
        turn: Turn::Node(words),
        function,
    });
    ARRIVED.notify_one();
}

/// Removes the last `count` functions of nodes, after their launch has failed.
pub fn expect_no_more(count: usize) {
    let mut queue = queue();
    for _ in 0..count {
        let last = queue
            .pending
            .iter()
            .rposition(|entry| matches!(entry.turn, Turn::Node(_)));
        if let Some(last) = last {
            queue.pending.remove(last);
        }
    }
}

/// A word of the arena, and the value that is to be written next.
#[derive(Clone, Copy, Debug)]
struct Done {
    word: Word,
    value: u64,
}

#[derive(Default)]
struct Queue {
    pending: VecDeque<Pending>,
    /// Words without a function, with the last value of each.
    free: Vec<Done>,
    free_nodes: Vec<NodeWords>,
    started: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    pending: VecDeque::new(),
    free: Vec::new(),
    free_nodes: Vec::new(),
    started: false,
});
static ARRIVED: Condvar = Condvar::new();

const WORD: u64 = 8;
/// The functions of a program may need as much stack as its threads do.
const STACK: usize = 8 << 20;

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock()
}

/// Calls a function when the present work of a stream is complete, and holds later work back until it has returned.
pub fn send(scope: Scope, target: Target, function: Function) -> Result {
    start(scope.session.session())?;
    let last = take_word(scope)?;
    let done = Done {
        value: last.value + 1,
        ..last
    };
    let cover = match target.fence_now(scope) {
        Ok(cover) => cover,
        Err(error) => {
            queue().free.push(last);
            return Err(error);
        }
    };
    queue().pending.push_back(Pending {
        turn: Turn::Stream {
            ready: (cover.fence, cover.value),
            done,
        },
        function,
    });
    ARRIVED.notify_one();
    mem_ops::send(
        scope,
        target,
        &[MemoryOperation {
            kind: mem_ops::WAIT_64,
            flags: mem_ops::GEQ,
            address: done.word.address(),
            value: done.value,
        }],
    )
}

/// Drops all functions that were not called yet, because their streams are gone.
pub fn forget_all() {
    let mut queue = queue();
    for entry in std::mem::take(&mut queue.pending) {
        if let Turn::Stream { done, .. } = entry.turn {
            queue.free.push(done);
        }
    }
}

fn take_word(scope: Scope) -> Result<Done> {
    if let Some(free) = queue().free.pop() {
        return Ok(free);
    }
    let words = take_page(scope)?;
    let mut words = words.into_iter().map(|word| Done { word, value: 0 });
    let first = words.next().ok_or(CuError::UNKNOWN)?;
    queue().free.extend(words);
    Ok(first)
}

/// Allocates a page and returns its words, all 0.
fn take_page(scope: Scope) -> Result<Vec<Word>> {
    let page = scope.session.allocate_arena(PAGE, PAGE)?;
    let words = (0..PAGE / WORD).map(|index| Word::new(page + index * WORD));
    // The page may contain old data.
    Ok(words
        .inspect(|word| word.get().store(0, Ordering::Relaxed))
        .collect())
}

/// Starts the thread, once in a process, with signals blocked.
fn start(session: &'static Session) -> Result {
    let mut queue = queue();
    if queue.started {
        return Ok(());
    }
    spawn_quiet("wormhole-host", STACK, move || serve(session)).map_err(|error| {
        log::error_once!("no thread for host functions: {error}");
        CuError::OPERATING_SYSTEM
    })?;
    queue.started = true;
    Ok(())
}

fn serve(session: &'static Session) {
    context::forbid_calls();
    loop {
        let mut waiting = queue();
        while waiting.pending.is_empty() {
            waiting = ARRIVED.wait(waiting);
        }
        drop(waiting);
        match session.wait(Wait::HostFunction, || take_ready(session)) {
            Ok(entry) => run(entry, session.alive().err().unwrap_or(CuResult::SUCCESS)),
            Err(error) => {
                let rest = std::mem::take(&mut queue().pending);
                rest.into_iter().for_each(|entry| run(entry, error));
            }
        }
    }
}

/// Takes the first function whose fence or word is set.
fn take_ready(session: &Session) -> Option<Pending> {
    let mut queue = queue();
    let index = queue.pending.iter().position(|entry| match entry.turn {
        Turn::Stream { ready, .. } => session.fence_passed(ready.0, ready.1),
        // SYNC POINT: node word. The function sees what the work before it wrote.
        Turn::Node(words) => words.ready.get().load(Ordering::Acquire) != 0,
    })?;
    let taken = queue.pending.remove(index)?;
    if let Turn::Node(words) = taken.turn {
        // The next launch sets it again, only after the end of this one.
        words.ready.get().store(0, Ordering::Relaxed);
    }
    Some(taken)
}

fn run(entry: Pending, result: CuResult) {
    // Managed memory that both sides use: the function sees what the work before it wrote, and the work behind it what
    // the function writes.
    gate::refresh();
    entry.function.call(result);
    gate::refresh();
    // SYNC POINT: stream word. The function's writes are visible to the work behind it.
    match entry.turn {
        Turn::Stream { done, .. } => {
            done.word.get().store(done.value, Ordering::Release);
            queue().free.push(done);
        }
        Turn::Node(words) => words.done.get().store(1, Ordering::Release),
    }
}
