//! What the processes of one tenant share with each other.
//!
//! A worker that shares something of its device gets a token for it, which its guest hands to whomever it
//! likes. A worker whose guest brings the token is given what the other worker said, if both sessions are of
//! one tenant and the worker that shares still lives. A token is 128 bits that nobody can guess.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use event_manager::EventOps;
use wormhole_device::{EventWords, PARTIES, WORDS_FILE, file};
use wormhole_ring::control::{Fetch, Fetched, Message, Share, Shared};

use super::{Id, Supervisor};
use wormhole_link::memory::Mapping;

/// Things that one session may share at the same time.
const LIMIT: usize = 1 << 14;
/// Files of a tenant with the scrubber up to which it also takes those that were refused.
const REFUSED: usize = 64;
/// `CUresult`s: what a guest is told of a token.
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;

/// Something that a session shares.
#[derive(Debug)]
struct Entry {
    tenant: Id,
    session: Id,
    what: u32,
    description: [u64; 8],
    descriptor: Option<OwnedFd>,
    /// An event's words are in the descriptor's file.
    words: bool,
    /// The sessions that use an event, each at its number but for the one that shares it, which is the first party.
    parties: Vec<Option<Id>>,
}

/// What a session is given for a token.
#[derive(Debug)]
struct Given {
    description: [u64; 8],
    descriptor: Option<OwnedFd>,
    party: u32,
}

impl Entry {
    /// A session uses what is shared: which of an event's parties it is.
    fn party(&mut self, session: Id) -> Option<u32> {
        if !self.words {
            return Some(0);
        }
        let find = |wanted| self.parties.iter().position(|party| *party == wanted);
        let place = find(Some(session)).or_else(|| find(None));
        let place = place.unwrap_or(self.parties.len());
        let number = u32::try_from(place + 1)
            .ok()
            .filter(|party| *party < PARTIES)?;
        if place == self.parties.len() {
            self.parties.push(None);
        }
        self.parties[place] = Some(session);
        Some(number)
    }

    /// A session has ended: what it recorded is complete, and who comes next may have its number.
    fn bury(&mut self, session: Id) {
        let own = self.session == session;
        let place = self
            .parties
            .iter()
            .position(|party| *party == Some(session));
        let (Some(file), true) = (&self.descriptor, self.words && (own || place.is_some())) else {
            return;
        };
        let Ok(mapping) = Mapping::new(file, 0, WORDS_FILE) else {
            tracing::error!(
                "the words of an event cannot be mapped: who waits for it may do so for ever"
            );
            return;
        };
        // SAFETY: pages of a file that cannot shrink, mapped until the end of this function.
        let words = unsafe { EventWords::new(mapping.base()) };
        if own {
            words.bury(0);
        }
        if let Some(place) = place {
            words.bury(u32::try_from(place + 1).unwrap_or(0));
            self.parties[place] = None;
        }
    }
}

/// Everything that is shared, by token.
#[derive(Debug, Default)]
pub(super) struct Shares {
    entries: BTreeMap<[u64; 2], Entry>,
}

impl Shares {
    /// Descriptors that are held for a tenant.
    pub fn held_for(&self, tenant: Id) -> usize {
        let own = |entry: &&Entry| entry.tenant == tenant && entry.descriptor.is_some();
        self.entries.values().filter(own).count()
    }

    /// Descriptors that are held for all of them.
    pub fn held(&self) -> usize {
        let held = |entry: &&Entry| entry.descriptor.is_some();
        self.entries.values().filter(held).count()
    }

    /// What is not taken stays with who brings it.
    fn add(
        &mut self,
        tenant: Id,
        session: Id,
        share: &Share,
        descriptor: &mut Option<OwnedFd>,
    ) -> Result<[u64; 2], u32> {
        let of_session = |entry: &&Entry| entry.session == session;
        if self.entries.values().filter(of_session).count() >= LIMIT {
            return Err(OUT_OF_MEMORY);
        }
        let words = share.words != 0 && descriptor.is_some();
        if words && descriptor.as_ref().and_then(file::fixed_size) != Some(WORDS_FILE as u64) {
            return Err(INVALID_VALUE);
        }
        let token = random().ok_or(OUT_OF_MEMORY)?;
        let entry = Entry {
            tenant,
            session,
            what: share.what,
            description: share.description,
            descriptor: descriptor.take(),
            words,
            parties: Vec::new(),
        };
        self.entries.insert(token, entry);
        Ok(token)
    }

    /// What a session of a tenant is given for a token.
    fn find(&mut self, tenant: Id, session: Id, fetch: &Fetch) -> Result<Given, u32> {
        let entry = self
            .entries
            .get_mut(&fetch.token)
            .filter(|entry| entry.tenant == tenant && entry.what == fetch.what)
            .ok_or(INVALID_VALUE)?;
        let descriptor = entry.descriptor.as_ref().map(OwnedFd::try_clone);
        Ok(Given {
            description: entry.description,
            descriptor: descriptor.transpose().map_err(|_| OUT_OF_MEMORY)?,
            party: entry.party(session).ok_or(OUT_OF_MEMORY)?,
        })
    }

    /// A session no longer shares something: its descriptor.
    fn remove(&mut self, session: Id, token: [u64; 2]) -> Option<OwnedFd> {
        let own = |entry: &Entry| entry.session == session;
        if !self.entries.get(&token).is_some_and(own) {
            return None;
        }
        self.entries.remove(&token)?.descriptor
    }

    /// A session's worker has ended: what waits for it waits no longer, and nobody finds what it shared. Its
    /// descriptors.
    fn end(&mut self, session: Id) -> Vec<OwnedFd> {
        for entry in self.entries.values_mut() {
            entry.bury(session);
        }
        let ended = |_: &[u64; 2], entry: &mut Entry| entry.session == session;
        self.entries
            .extract_if(.., ended)
            .filter_map(|(_, entry)| entry.descriptor)
            .collect()
    }
}

/// Sixteen bytes that nobody knows.
fn random() -> Option<[u64; 2]> {
    let mut token = [0_u64; 2];
    let bytes = size_of_val(&token);
    // SAFETY: the kernel fills that many bytes.
    let filled = unsafe { libc::getrandom(token.as_mut_ptr().cast(), bytes, 0) };
    (usize::try_from(filled) == Ok(bytes)).then_some(token)
}

impl Supervisor {
    /// A worker shares something.
    pub(super) fn share(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        share: &Share,
        mut descriptor: Option<OwnedFd>,
    ) {
        let Some(tenant) = self.sessions.get(&key).map(|session| session.tenant) else {
            return;
        };
        let answer = if descriptor.is_some() && !self.may_hold(tenant, 1) {
            Err(OUT_OF_MEMORY)
        } else {
            self.shares.add(tenant, key, share, &mut descriptor)
        };
        // The worker itself still has what it shares, so to close it here takes long only if the worker lies; and then
        // no more of its files are kept than the scrubber is soon done with.
        if let Some(refused) = descriptor
            && self.scrubber.held_for(tenant) < REFUSED
        {
            self.scrubber.forget(tenant, refused);
        }
        let shared = Message::Shared(Shared {
            id: share.id,
            result: answer.err().unwrap_or(0),
            token: answer.unwrap_or_default(),
        });
        self.answer_worker(ops, key, &shared, Vec::new());
    }

    /// A worker's guest has a token.
    pub(super) fn fetch(&mut self, ops: &mut EventOps<'_>, key: Id, fetch: &Fetch) {
        let Some(tenant) = self.sessions.get(&key).map(|session| session.tenant) else {
            return;
        };
        let mut fetched = Fetched {
            id: fetch.id,
            ..Fetched::default()
        };
        let mut descriptors = Vec::new();
        match self.shares.find(tenant, key, fetch) {
            Ok(given) => {
                fetched.description = given.description;
                fetched.party = given.party;
                fetched.descriptor = u32::from(given.descriptor.is_some());
                descriptors.extend(given.descriptor);
            }
            Err(result) => fetched.result = result,
        }
        self.answer_worker(ops, key, &Message::Fetched(fetched), descriptors);
    }

    /// A worker shares something no longer. It is told when what was held is closed, and so knows that the memory is
    /// free.
    pub(super) fn unshare(&mut self, ops: &mut EventOps<'_>, key: Id, fetch: &Fetch) {
        let held = self.shares.remove(key, fetch.token);
        let tenant = self.sessions.get(&key).map(|session| session.tenant);
        let waits = tenant
            .zip(held)
            .is_some_and(|(tenant, file)| self.scrubber.forget_for(tenant, file, key, fetch.id));
        if !waits {
            self.unshared(ops, key, fetch.id);
        }
    }

    /// Nothing is held any more of what a worker asked to unshare.
    pub(super) fn unshared(&mut self, ops: &mut EventOps<'_>, key: Id, request: u32) {
        let fetched = Message::Fetched(Fetched {
            id: request,
            ..Fetched::default()
        });
        self.answer_worker(ops, key, &fetched, Vec::new());
    }

    /// A session's worker has been reaped.
    pub(super) fn end_shares(&mut self, key: Id, tenant: Id) {
        for file in self.shares.end(key) {
            self.scrubber.forget(tenant, file);
        }
    }

    fn answer_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        session: Id,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) {
        if let Some(worker) = self.worker_of(session)
            && let Err(error) = worker.peer.send(ops, message, descriptors)
        {
            tracing::warn!(
                "worker {} takes no {}: {error}",
                worker.process.pid(),
                message.name()
            );
            worker.process.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wormhole_link::memory;

    const MEMORY: u32 = 1;

    fn fetch(token: [u64; 2], what: u32) -> Fetch {
        Fetch { id: 1, what, token }
    }

    fn share(words: u32) -> Share {
        Share {
            what: MEMORY,
            description: [7; 8],
            words,
            ..Share::default()
        }
    }

    fn words_file() -> OwnedFd {
        let file = memory::anonymous_file(c"words").unwrap();
        std::fs::File::from(file.try_clone().unwrap())
            .set_len(WORDS_FILE as u64)
            .unwrap();
        file
    }

    #[test]
    fn only_a_session_of_the_tenant_finds_what_is_shared_while_it_is() {
        let mut shares = Shares::default();
        let token = shares.add(1, 10, &share(0), &mut None).unwrap();
        let found = |shares: &mut Shares, tenant, token, what| {
            let found = shares.find(tenant, 11, &fetch(token, what));
            found.map(|given| given.description)
        };
        assert_eq!(found(&mut shares, 1, token, MEMORY), Ok([7; 8]));
        assert_eq!(found(&mut shares, 2, token, MEMORY), Err(INVALID_VALUE));
        assert_eq!(found(&mut shares, 1, token, MEMORY + 1), Err(INVALID_VALUE));
        for forged in [[token[0], token[1] ^ 1], [token[1], token[0]], [0; 2]] {
            assert_eq!(found(&mut shares, 1, forged, MEMORY), Err(INVALID_VALUE));
        }
        assert_ne!(shares.add(1, 10, &share(0), &mut None), Ok(token));
        shares.remove(11, token);
        assert_eq!(
            found(&mut shares, 1, token, MEMORY),
            Ok([7; 8]),
            "not its own"
        );
        shares.remove(10, token);
        assert_eq!(found(&mut shares, 1, token, MEMORY), Err(INVALID_VALUE));
    }

    #[test]
    fn a_session_shares_no_more_than_it_may_and_holds_no_other_up() {
        let mut shares = Shares::default();
        for _ in 0..LIMIT {
            shares.add(1, 10, &share(0), &mut None).unwrap();
        }
        assert_eq!(shares.add(1, 10, &share(0), &mut None), Err(OUT_OF_MEMORY));
        shares.add(1, 11, &share(0), &mut None).unwrap();
        shares.end(10);
        shares.add(1, 10, &share(0), &mut None).unwrap();
    }

    #[test]
    fn descriptors_are_counted_and_come_back() {
        let mut shares = Shares::default();
        let token = shares
            .add(1, 10, &share(0), &mut Some(words_file()))
            .unwrap();
        shares
            .add(1, 10, &share(0), &mut Some(words_file()))
            .unwrap();
        shares
            .add(2, 12, &share(0), &mut Some(words_file()))
            .unwrap();
        assert_eq!((shares.held_for(1), shares.held()), (2, 3));
        assert!(shares.remove(10, token).is_some());
        assert!(shares.remove(10, token).is_none());
        assert_eq!(shares.end(10).len(), 1);
        assert_eq!((shares.held_for(1), shares.held()), (0, 1));
    }

    #[test]
    fn the_end_of_a_party_ends_the_waits_for_it_and_for_no_other() {
        let mut shares = Shares::default();
        let file = words_file();
        memory::seal_size(&file).unwrap();
        let mapping = Mapping::new(&file, 0, WORDS_FILE).unwrap();
        // SAFETY: mapped until the end of the test.
        let words = unsafe { EventWords::new(mapping.base()) };
        let token = shares.add(1, 10, &share(1), &mut Some(file)).unwrap();
        let party = |shares: &mut Shares, session| {
            let given = shares.find(1, session, &fetch(token, MEMORY));
            given.map(|given| given.party)
        };
        assert_eq!(party(&mut shares, 11), Ok(1));
        assert_eq!(party(&mut shares, 12), Ok(2));
        assert_eq!(party(&mut shares, 11), Ok(1), "once each");
        let [first, second, own] = [1, 2, 0].map(|party| words.record(party));
        shares.end(11);
        assert!(words.is_complete(first) && !words.is_complete(second));
        assert_eq!(party(&mut shares, 13), Ok(1), "its number is another's");
        assert!(!words.is_complete(words.record(1)));
        shares.end(12);
        assert!(words.is_complete(second) && !words.is_complete(own));
        // As many as there may be at the same time, and then one for each that goes.
        let last = 13 + Id::from(PARTIES);
        for session in 14..last - 1 {
            party(&mut shares, session).unwrap();
        }
        assert_eq!(party(&mut shares, last), Err(OUT_OF_MEMORY));
        shares.end(20);
        assert!(party(&mut shares, last).is_ok());
        shares.end(10);
        assert!(words.is_complete(own));
    }

    #[test]
    fn an_event_whose_file_may_shrink_is_not_shared() {
        let mut shares = Shares::default();
        let unsealed = shares.add(1, 10, &share(1), &mut Some(words_file()));
        assert_eq!(unsealed, Err(INVALID_VALUE));
        let (pipe, _) = std::io::pipe().unwrap();
        assert_eq!(
            shares.add(1, 10, &share(1), &mut Some(pipe.into())),
            Err(INVALID_VALUE)
        );
    }
}
