//! Exchange of shared objects with the other workers of the tenant, through the supervisor.
//!
//! Jobs send a question and wait; the thread that reads the supervisor's messages delivers the
//! answer.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use wormhole_api::CuResult;
use wormhole_device::{Found, Result, Shared};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::control::{Fetch, Message, Share};

/// Name of a shared object at the supervisor.
pub type Token = [u8; 16];

/// Kind of a shared object. A token names an object of one kind only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum What {
    Allocation = 1,
    Event = 2,
    Memory = 3,
    Pool = 4,
    Pointer = 5,
}

/// Answer of the supervisor.
#[derive(Debug)]
pub enum Reply {
    Token([u64; 2]),
    Found(Found),
    Refused(CuResult),
}

/// Sends a message to the supervisor. Returns false if the supervisor is gone.
type Send = dyn Fn(&Message<'_>, Vec<OwnedFd>) -> bool + std::marker::Send + Sync;

/// Connection to the tenant's other workers, through the supervisor.
#[derive(Clone)]
pub struct Exchange {
    send: Arc<Send>,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    last_id: u32,
    jobs: HashMap<u32, Sender<Reply>>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").finish_non_exhaustive()
    }
}

impl Exchange {
    pub fn new(
        send: impl Fn(&Message<'_>, Vec<OwnedFd>) -> bool + std::marker::Send + Sync + 'static,
    ) -> Self {
        Self {
            send: Arc::new(send),
            waiting: Arc::default(),
        }
    }

    /// Returns an exchange without a supervisor: sharing and fetching fail.
    pub fn none() -> Self {
        Self::new(|_, _| false)
    }

    /// Shares an object that the device has exported, and returns its token.
    pub fn share(&self, what: What, shared: Shared) -> Result<Token> {
        let (descriptor, words) = (u32::from(shared.descriptor.is_some()), shared.words.into());
        let description = shared.description;
        let message = |id| {
            Message::Share(Share {
                id,
                what: what as u32,
                descriptor,
                words,
                description,
            })
        };
        match self.ask(message, shared.descriptor.into_iter().collect())? {
            Reply::Token(token) => Ok(to_token(token)),
            Reply::Refused(error) => Err(error),
            Reply::Found(_) => Err(CuResult::UNKNOWN),
        }
    }

    /// Fetches the object that a worker of the tenant has shared under this token.
    pub fn fetch(&self, what: What, token: Token) -> Result<Found> {
        let message = |id| Message::Fetch(fetch(id, what, token));
        match self.ask(message, Vec::new())? {
            Reply::Found(found) => Ok(found),
            Reply::Refused(error) => Err(error),
            Reply::Token(_) => Err(CuResult::UNKNOWN),
        }
    }

    /// Withdraws a shared object. On return no worker can fetch it, and the supervisor holds no
    /// descriptor of it.
    pub fn unshare(&self, what: What, token: Token) {
        let message = |id| Message::Unshare(fetch(id, what, token));
        // Without a supervisor no worker can fetch it anyway.
        drop(self.ask(message, Vec::new()));
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock()
    }

    fn ask(
        &self,
        message: impl FnOnce(u32) -> Message<'static>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Reply> {
        let (sender, answer) = channel();
        let id = {
            let mut waiting = self.waiting();
            waiting.last_id = waiting.last_id.wrapping_add(1);
            let id = waiting.last_id;
            waiting.jobs.insert(id, sender);
            id
        };
        if !(self.send)(&message(id), descriptors) {
            self.waiting().jobs.remove(&id);
            return Err(CuResult::NOT_SUPPORTED);
        }
        // The process ends when the supervisor is gone.
        answer.recv().map_err(|_| CuResult::UNKNOWN)
    }

    /// Delivers an answer to the job that waits for it.
    pub fn answer(&self, id: u32, result: u32, reply: Reply) {
        let reply = match result {
            0 => reply,
            code => Reply::Refused(CuResult(code)),
        };
        let job = self.waiting().jobs.remove(&id);
        match job {
            // The job holds the receiver until its answer arrives, so the send succeeds.
            Some(job) => drop(job.send(reply)),
            None => tracing::error!(
                "the supervisor answered request {id}, but no job of this worker waits for it; the answer is dropped"
            ),
        }
    }
}

fn fetch(id: u32, what: What, token: Token) -> Fetch {
    let (low, high) = token.split_at(8);
    let word = |half: &[u8]| u64::from_le_bytes(half.try_into().unwrap_or_default());
    Fetch {
        id,
        what: what as u32,
        token: [word(low), word(high)],
    }
}

fn to_token(words: [u64; 2]) -> Token {
    let mut token = Token::default();
    for (part, word) in token.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *part = word.to_le_bytes();
    }
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_as_it_went() {
        let words = [0x0102_0304_0506_0708, u64::MAX - 5];
        assert_eq!(fetch(1, What::Pool, to_token(words)).token, words);
    }

    #[test]
    fn each_job_gets_its_own_answer() {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&sent);
        let exchange = Exchange::new(move |message, _| {
            if let Message::Fetch(fetch) = message {
                seen.lock().push(*fetch);
            }
            true
        });
        let ask = |token| {
            let exchange = exchange.clone();
            std::thread::spawn(move || exchange.fetch(What::Event, [token; 16]))
        };
        let (first, second) = (ask(1), ask(2));
        while sent.lock().len() < 2 {
            std::thread::yield_now();
        }
        for fetch in sent.lock().iter() {
            let found = Found {
                description: [fetch.token[0] & 0xFF; 8],
                descriptor: None,
                party: 0,
            };
            exchange.answer(fetch.id, 0, Reply::Found(found));
        }
        assert_eq!(first.join().unwrap().unwrap().description, [1; 8]);
        assert_eq!(second.join().unwrap().unwrap().description, [2; 8]);
        exchange.answer(77, 0, Reply::Token([0; 2]));
        assert_eq!(
            Exchange::none().fetch(What::Event, [0; 16]).err(),
            Some(CuResult::NOT_SUPPORTED)
        );
    }
}
