//! Functions of the program that streams call: on one thread of their own, in stream order.
//!
//! A fence says when the work before a function is complete. The thread then calls it and writes a word of
//! the arena, for which the stream has been waiting since, so that the work behind is held back. The program
//! can hold up its own streams so, and nothing else.
//!
//! Words only grow: one may serve the next function while a stream has not yet looked at its last value.
//!
//! A function that is a node of a graph has two words of its own: the graph sets one when it is the node's turn,
//! and waits for the other, which it then clears.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use wormhole_api::{CuResult, Fence, MemoryOperation};
use wormhole_ring::waits::Wait;

use crate::error::{CuError, Result};
use crate::log;
use crate::object::context::{self, Scope};
use crate::object::stream::Target;
use crate::session::{self, Session};
use crate::types::{CUhostFn, CUstream, CUstreamCallback};
use crate::work::copy3d::{self, Place};
use crate::work::mem_ops::{self, Word};

/// What is called.
#[derive(Clone, Copy, Debug)]
pub enum Function {
    /// `cuLaunchHostFunc`: not called after a fault.
    Plain {
        function: CUhostFn,
        data: *mut c_void,
    },
    /// `cuStreamAddCallback`: told of a fault.
    Callback {
        function: CUstreamCallback,
        stream: CUstream,
        data: *mut c_void,
    },
    /// A copy of a graph between the program's memory and arena.
    Rows {
        to: Place,
        from: Place,
        extent: [u64; 3],
    },
    /// What a node does that is disabled.
    Nothing,
}

// SAFETY: the pointers are the program's; it hands them over to be given to its function on another thread.
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
                // SAFETY: the graph keeps the arena, and the program vouches for its own memory.
                unsafe { copy3d::copy_rows(&to, &from, extent) };
            }
            _ => {}
        }
    }
}

/// When it is a function's turn, and who waits for its end.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Stream {
        /// Written when the work before it is complete.
        ready: (Fence, u64),
        /// What its stream waits for.
        done: Done,
    },
    Node(NodeWords),
}

/// A function that was handed over.
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

    /// Gives the words back: no launch uses them any more.
    pub fn give_back(self) {
        for word in [self.ready, self.done] {
            word.get().store(0, Ordering::Relaxed);
        }
        queue().free_nodes.push(self);
    }

    /// What the node's graph does in its place.
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

/// Has a function called when the turn of its node comes, in the launch that follows.
pub fn expect(words: NodeWords, function: Function) {
    queue().pending.push_back(Pending {
        turn: Turn::Node(words),
        function,
    });
    ARRIVED.notify_one();
}

/// Takes back what was expected of a launch that did not come about.
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
    /// Words that no function has, with the last value of each.
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

/// Bytes of arena that words are taken from.
const PAGE: u64 = 4096;
const WORD: u64 = 8;
/// The functions of a program may need as much stack as its threads do.
const STACK: usize = 8 << 20;

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function when the work of a stream so far is complete, and holds the work behind back until it
/// has returned.
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

/// Forgets what was not called yet: its streams are gone.
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

/// The words of a new page, all 0.
fn take_page(scope: Scope) -> Result<Vec<Word>> {
    let page = scope.session.allocate_arena(PAGE, PAGE)?;
    let words = (0..PAGE / WORD).map(|index| Word::new(page + index * WORD));
    // The page may have been another's before.
    Ok(words
        .inspect(|word| word.get().store(0, Ordering::Relaxed))
        .collect())
}

/// Starts the thread, once in a process. It takes no signal of the program's.
fn start(session: &'static Session) -> Result {
    let mut queue = queue();
    if queue.started {
        return Ok(());
    }
    session::spawn_quiet("wormhole-host", STACK, move || serve(session)).map_err(|error| {
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
            waiting = ARRIVED
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
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

/// Takes the first function whose turn has come, or an end of the wait when there is none left.
fn take_ready(session: &Session) -> Option<Pending> {
    let mut queue = queue();
    let index = queue.pending.iter().position(|entry| match entry.turn {
        Turn::Stream { ready, .. } => session.fence_passed(ready.0, ready.1),
        // SYNC POINT: node word. The function sees what the work before it wrote.
        Turn::Node(words) => words.ready.get().load(Ordering::Acquire) != 0,
    })?;
    let taken = queue.pending.remove(index)?;
    if let Turn::Node(words) = taken.turn {
        // The next launch sets it again, and comes only after this one's end.
        words.ready.get().store(0, Ordering::Relaxed);
    }
    Some(taken)
}

fn run(entry: Pending, result: CuResult) {
    entry.function.call(result);
    // SYNC POINT: stream word. What the function wrote is visible to the work behind it.
    match entry.turn {
        Turn::Stream { done, .. } => {
            done.word.get().store(done.value, Ordering::Release);
            queue().free.push(done);
        }
        Turn::Node(words) => words.done.get().store(1, Ordering::Release),
    }
}
