//! Shares memory, events and pools between the processes of one tenant (`cuIpc*`, shareable handles, pools).
//!
//! A worker registers a shared object with the supervisor: a token of 128 random bits, the device's description of the
//! object, and a descriptor where there is one. The guest passes the token on as it likes: handles carry it. A worker whose
//! guest brings the token gets the description, if both sessions belong to one tenant and the worker that shares still
//! lives. The supervisor forgets the token when the object or its worker ends.
//!
//! - A descriptor that a program exports is a socket from which the importing process reads the token. The socket's peer
//!   detects when the last copy is closed.
//! - The words of an event lie in a file of its own, in which the supervisor notes the death of a party, so that nothing
//!   waits for it. On a GPU, streams write and await these words by memory operations: the driver's own events between
//!   processes need files and a user that workers have in common.
//! - The driver's own handles of memory need processes with different numbers, and are no secret: a worker that was taken
//!   over could guess another's. For one tenant, or tenants that trust each other, root gives all workers of GPUs one PID
//!   namespace (`wormhole-sandbox`, `processes.rs`). Elsewhere each worker has a namespace of its own, and the device offers
//!   no such handles.
//! - The CPU device has all its memory in a file.
//!
//! Files of shared memory that a process registers do not pass through here: the guest sends them to its worker
//! (`backend-vm/worker/src/session/files.rs`), so that two processes that register one file have the same pages.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use event_manager::EventOps;
use rustix::fs::SealFlags;
use rustix::rand::GetRandomFlags;
use wormhole_api::CuResult;
use wormhole_device::{PARTIES, WORDS_FILE, file};
use wormhole_link::memory;
use wormhole_ring::control::{Fetch, Fetched, Message, Share, Shared};

use super::Id;
use super::descriptors::UNDERWAY;
use super::tenant_loop::TenantLoop;
use super::window_memory::device_number;

/// Largest number of objects that one session may share at the same time.
const SESSION_LIMIT: usize = 1 << 14;
/// Largest number of objects that one tenant may share.
const TENANT_LIMIT: usize = 1 << 15;
/// Largest number of objects that all tenants may share.
const LIMIT: usize = 1 << 18;
/// Results of a guest's calls with a token, as `CUresult`s.
const INVALID_VALUE: u32 = CuResult::INVALID_VALUE.0;
const OUT_OF_MEMORY: u32 = CuResult::OUT_OF_MEMORY.0;

type Token = [u64; 2];

/// An object that a session shares.
#[derive(Debug)]
struct Entry {
    tenant: Id,
    session: Id,
    what: u32,
    description: [u64; 8],
    descriptor: Option<OwnedFd>,
    /// Whether the descriptor's file contains the words of an event.
    words: bool,
    /// Other sessions that use an event. The index plus one is the party's number; the session that
    /// shares the event is party 0.
    parties: Vec<Party>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Party {
    Free,
    Used(Id),
    /// The session has ended, but its records of the event are not marked complete yet.
    Ended,
}

/// Answer to a session's token.
#[derive(Debug)]
struct Given {
    description: [u64; 8],
    descriptor: Option<OwnedFd>,
    party: u32,
}

impl Entry {
    /// Returns the event's party number of a session, which is assigned at first use.
    fn party(&mut self, session: Id) -> Option<u32> {
        if !self.words {
            return Some(0);
        }
        let find = |wanted| self.parties.iter().position(|party| *party == wanted);
        let place = find(Party::Used(session)).or_else(|| find(Party::Free));
        let place = place.unwrap_or(self.parties.len());
        let number = u32::try_from(place + 1)
            .ok()
            .filter(|party| *party < PARTIES)?;
        if place == self.parties.len() {
            self.parties.push(Party::Free);
        }
        self.parties[place] = Party::Used(session);
        Some(number)
    }
}

/// Descriptors left by a session that shared or used objects.
#[derive(Debug)]
enum Left {
    /// A descriptor to close.
    File(OwnedFd),
    /// Words of an event in which the records of some parties, a bit each, must be completed.
    Words(OwnedFd, Token, u32),
}

/// Number of a tenant's shared objects, and of their descriptors.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    entries: usize,
    descriptors: usize,
}

/// All shared objects, by token.
#[derive(Debug, Default)]
pub(super) struct Shares {
    entries: BTreeMap<Token, Entry>,
    /// Tokens of the objects that each session shares.
    of_session: BTreeMap<Id, BTreeSet<Token>>,
    /// Tokens of the events that each session uses.
    of_party: BTreeMap<Id, BTreeSet<Token>>,
    of_tenant: BTreeMap<Id, Count>,
    descriptors: usize,
}

impl Shares {
    /// Returns the number of descriptors held for a tenant.
    pub fn held_for(&self, tenant: Id) -> usize {
        self.count(tenant).descriptors
    }

    /// Returns the number of descriptors held for all tenants.
    #[cfg(test)]
    pub fn held(&self) -> usize {
        self.descriptors
    }

    /// Returns the sessions that share an object or use an event.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn sessions(&self) -> impl Iterator<Item = Id> {
        let sharing = self.entries.values().map(|entry| entry.session);
        let using = self.of_party.keys().copied();
        sharing.chain(using)
    }

    fn count(&self, tenant: Id) -> Count {
        self.of_tenant.get(&tenant).copied().unwrap_or_default()
    }

    /// Returns whether a session may share another object. A tenant may share at most as many as it
    /// leaves to the others.
    fn has_room(&self, tenant: Id, session: Id) -> bool {
        let of_session = self.of_session.get(&session).map_or(0, BTreeSet::len);
        let of_tenant = self.count(tenant).entries;
        let left = LIMIT.saturating_sub(self.entries.len());
        of_session < SESSION_LIMIT && of_tenant < TENANT_LIMIT.min(left)
    }

    /// Adds a shared object. Takes the descriptor only on success.
    fn add(
        &mut self,
        tenant: Id,
        session: Id,
        share: &Share,
        descriptor: &mut Option<OwnedFd>,
    ) -> Result<Token, u32> {
        if !self.has_room(tenant, session) {
            return Err(OUT_OF_MEMORY);
        }
        let words = share.words != 0 && descriptor.is_some();
        if words && !descriptor.as_ref().is_some_and(holds_words) {
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
        let count = self.of_tenant.entry(tenant).or_default();
        count.entries += 1;
        if entry.descriptor.is_some() {
            count.descriptors += 1;
            self.descriptors += 1;
        }
        self.of_session.entry(session).or_default().insert(token);
        self.entries.insert(token, entry);
        Ok(token)
    }

    /// Returns the description of a shared object to a session of its tenant, by token.
    fn find(&mut self, tenant: Id, session: Id, fetch: &Fetch) -> Result<Given, u32> {
        let entry = self
            .entries
            .get_mut(&fetch.token)
            .filter(|entry| entry.tenant == tenant && entry.what == fetch.what)
            .ok_or(INVALID_VALUE)?;
        let descriptor = entry.descriptor.as_ref().map(OwnedFd::try_clone);
        let given = Given {
            description: entry.description,
            descriptor: descriptor.transpose().map_err(|_| OUT_OF_MEMORY)?,
            party: entry.party(session).ok_or(OUT_OF_MEMORY)?,
        };
        if entry.words {
            let used = self.of_party.entry(session).or_default();
            used.insert(fetch.token);
        }
        Ok(given)
    }

    /// Removes a shared object of a session, and returns its descriptor.
    fn remove(&mut self, session: Id, token: Token) -> Option<OwnedFd> {
        let own = |entry: &Entry| entry.session == session;
        if !self.entries.get(&token).is_some_and(own) {
            return None;
        }
        self.take(token)?.descriptor
    }

    fn take(&mut self, token: Token) -> Option<Entry> {
        let entry = self.entries.remove(&token)?;
        forget(&mut self.of_session, entry.session, token);
        for party in &entry.parties {
            if let Party::Used(session) = party {
                forget(&mut self.of_party, *session, token);
            }
        }
        if let Some(count) = self.of_tenant.get_mut(&entry.tenant) {
            count.entries -= 1;
            if entry.descriptor.is_some() {
                count.descriptors -= 1;
                self.descriptors -= 1;
            }
            if count.entries == 0 {
                self.of_tenant.remove(&entry.tenant);
            }
        }
        Some(entry)
    }

    /// Removes the shared objects of a session whose worker has ended. Returns the descriptors to
    /// close, and the events whose records must be completed, so that other sessions stop waiting
    /// for them.
    fn end(&mut self, session: Id) -> Vec<Left> {
        let mut left = Vec::new();
        for token in self.of_session.remove(&session).unwrap_or_default() {
            let Some(entry) = self.take(token) else {
                continue;
            };
            left.extend(entry.descriptor.map(|file| match entry.words {
                true => Left::Words(file, token, 1),
                false => Left::File(file),
            }));
        }
        for token in self.of_party.remove(&session).unwrap_or_default() {
            let Some(entry) = self.entries.get_mut(&token) else {
                continue;
            };
            let place = entry
                .parties
                .iter()
                .position(|party| *party == Party::Used(session));
            let (Some(place), Some(file)) = (place, &entry.descriptor) else {
                continue;
            };
            entry.parties[place] = Party::Ended;
            match file.try_clone() {
                Ok(file) => left.push(Left::Words(file, token, 2 << place)),
                Err(error) => tracing::error!(
                    "the words of an event cannot be reached, and a process that waits for it may wait for ever: {error}"
                ),
            }
        }
        left
    }

    /// Frees party numbers whose records are complete.
    pub fn records_completed(&mut self, token: Token, parties: u32) {
        if let Some(entry) = self.entries.get_mut(&token) {
            for (place, party) in (0..).zip(&mut entry.parties) {
                if *party == Party::Ended && parties & 2 << place != 0 {
                    *party = Party::Free;
                }
            }
        }
    }
}

fn forget(index: &mut BTreeMap<Id, BTreeSet<Token>>, session: Id, token: Token) {
    if let Some(tokens) = index.get_mut(&session) {
        tokens.remove(&token);
        if tokens.is_empty() {
            index.remove(&session);
        }
    }
}

/// Returns whether a file is anonymous memory that can be mapped writable, with the fixed size of
/// an event's words.
fn holds_words(file: &OwnedFd) -> bool {
    let read_only = SealFlags::WRITE | SealFlags::FUTURE_WRITE;
    let writable = memory::seals(file).is_ok_and(|seals| !seals.intersects(read_only));
    writable && file::fixed_size(file) == Some(WORDS_FILE as u64)
}

/// Returns whether a descriptor is one of the driver's device files, as its exports are.
fn is_export(file: &OwnedFd) -> bool {
    /// `/dev/nvidiactl`, with the driver's registered major number (Linux, Documentation/admin-guide/devices.txt). The
    /// exports of memory and of pools were such descriptors on an H100 with driver 580.
    const NVIDIA: (u32, u32) = (195, 255);
    device_number(file).is_ok_and(|number| number == Some(NVIDIA))
}

/// Returns sixteen random bytes.
fn random() -> Option<[u64; 2]> {
    let mut token = [[0; 8]; 2];
    let bytes = token.as_flattened_mut();
    let length = bytes.len();
    let filled = rustix::rand::getrandom(bytes, GetRandomFlags::empty());
    (filled == Ok(length)).then(|| token.map(u64::from_ne_bytes))
}

impl TenantLoop {
    /// Handles a worker's request to share an object.
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
        let answer = match &descriptor {
            Some(file) if !self.may_share(file) => Err(INVALID_VALUE),
            Some(_) if !self.may_hold(tenant, 1) => Err(OUT_OF_MEMORY),
            _ => self.shares.add(tenant, key, share, &mut descriptor),
        };
        self.scrubber.close(tenant, descriptor);
        self.answer_share(ops, key, share.id, answer);
    }

    /// Refuses a worker's request whose descriptor was lost, because the supervisor had none free.
    pub(super) fn refuse_share(&mut self, ops: &mut EventOps<'_>, key: Id, request: u32) {
        self.answer_share(ops, key, request, Err(OUT_OF_MEMORY));
    }

    fn answer_share(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        request: u32,
        answer: Result<Token, u32>,
    ) {
        let shared = Message::Shared(Shared {
            id: request,
            result: answer.err().unwrap_or(0),
            token: answer.unwrap_or_default(),
        });
        self.answer_worker(ops, key, &shared, Vec::new());
    }

    /// Returns whether a descriptor is one that workers share: memory of fixed size, or an export
    /// of the driver. Of other files only the seals are queried, because other queries may block
    /// for as long as the file's owner likes.
    fn may_share(&self, file: &OwnedFd) -> bool {
        let exports = self.service.as_ref().is_some_and(|one| one.has_driver);
        file::fixed_size(file).is_some() || (exports && is_export(file))
    }

    /// Handles a worker's request for the object with its guest's token.
    pub(super) fn fetch(&mut self, ops: &mut EventOps<'_>, key: Id, fetch: &Fetch) {
        let Some(tenant) = self.sessions.get(&key).map(|session| session.tenant) else {
            return;
        };
        let mut fetched = Fetched {
            id: fetch.id,
            ..Fetched::default()
        };
        let mut descriptors = Vec::new();
        let underway = self
            .worker_of(key)
            .map_or(0, |worker| worker.peer.underway());
        // A worker that reads its answers has few of them underway.
        let found = if underway >= UNDERWAY || self.check_in_flight(1).is_err() {
            Err(OUT_OF_MEMORY)
        } else {
            self.shares.find(tenant, key, fetch)
        };
        match found {
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

    /// Handles a worker's request to withdraw an object. The answer follows once the descriptor is
    /// closed, so that the worker knows that the memory is free.
    pub(super) fn unshare(&mut self, ops: &mut EventOps<'_>, key: Id, fetch: &Fetch) {
        let held = self.shares.remove(key, fetch.token);
        let tenant = self.sessions.get(&key).map(|session| session.tenant);
        match tenant.zip(held) {
            Some((tenant, file)) => self.scrubber.close_for(tenant, file, key, fetch.id),
            None => self.unshared(ops, key, fetch.id),
        }
    }

    /// Answers a worker's request to withdraw an object.
    pub(super) fn unshared(&mut self, ops: &mut EventOps<'_>, key: Id, request: u32) {
        let fetched = Message::Fetched(Fetched {
            id: request,
            ..Fetched::default()
        });
        self.answer_worker(ops, key, &fetched, Vec::new());
    }

    /// Ends the shares of a session whose worker has been reaped.
    pub(super) fn end_shares(&mut self, key: Id, tenant: Id) {
        let mut files = Vec::new();
        for left in self.shares.end(key) {
            match left {
                Left::File(file) => files.push(file),
                Left::Words(file, token, parties) => {
                    self.scrubber.complete_records(tenant, file, token, parties);
                }
            }
        }
        self.scrubber.close(tenant, files);
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
    use crate::scrubber::complete_records;
    use rustix::fs::fcntl_add_seals;
    use wormhole_device::EventWords;
    use wormhole_link::memory::Mapping;

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

    /// Ends a session and completes its events.
    fn end(shares: &mut Shares, session: Id) -> usize {
        let left = shares.end(session);
        let count = left.len();
        for left in left {
            if let Left::Words(file, token, parties) = left {
                complete_records(&file, parties).unwrap();
                shares.records_completed(token, parties);
            }
        }
        count
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
        for _ in 0..SESSION_LIMIT {
            shares.add(1, 10, &share(0), &mut None).unwrap();
        }
        assert_eq!(shares.add(1, 10, &share(0), &mut None), Err(OUT_OF_MEMORY));
        shares.add(1, 11, &share(0), &mut None).unwrap();
        end(&mut shares, 10);
        shares.add(1, 10, &share(0), &mut None).unwrap();
    }

    #[test]
    fn tenants_share_no_more_than_they_leave_to_others() {
        let mut shares = Shares::default();
        let mut fill = |tenant: Id| {
            let mut count = 0;
            // More sessions than the limit needs.
            for session in 0..8 {
                let session = 100 * tenant + session;
                while shares.add(tenant, session, &share(0), &mut None).is_ok() {
                    count += 1;
                }
            }
            count
        };
        assert_eq!(fill(1), TENANT_LIMIT);
        for tenant in 2..20 {
            assert!(fill(tenant) > 0);
        }
        assert!(shares.entries.len() < LIMIT);
        for session in 0..8 {
            end(&mut shares, 100 + session);
        }
        assert!(shares.has_room(1, 100));
        assert!(shares.count(1).entries == 0 && !shares.of_session.contains_key(&100));
    }

    #[test]
    fn the_number_of_a_party_that_ended_is_nobodys_until_its_records_are_complete() {
        let mut shares = Shares::default();
        let file = words_file();
        memory::seal_size(&file).unwrap();
        let token = shares.add(1, 10, &share(1), &mut Some(file)).unwrap();
        let mut party = |session| {
            shares
                .find(1, session, &fetch(token, MEMORY))
                .unwrap()
                .party
        };
        assert_eq!((party(11), party(12)), (1, 2));
        let left = shares.end(11);
        assert!(matches!(left[..], [Left::Words(_, _, 0b10)]), "{left:?}");
        let mut party = |session| {
            shares
                .find(1, session, &fetch(token, MEMORY))
                .unwrap()
                .party
        };
        assert_eq!(party(13), 3);
        shares.records_completed(token, 0b10);
        let mut party = |session| {
            shares
                .find(1, session, &fetch(token, MEMORY))
                .unwrap()
                .party
        };
        assert_eq!(party(14), 1);
        // A removed share has no parties.
        shares.remove(10, token);
        assert!(shares.of_party.is_empty(), "{:?}", shares.of_party);
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
        assert_eq!(end(&mut shares, 10), 1);
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
        end(&mut shares, 11);
        assert!(words.is_complete(first) && !words.is_complete(second));
        assert_eq!(party(&mut shares, 13), Ok(1), "its number is another's");
        assert!(!words.is_complete(words.record(1)));
        end(&mut shares, 12);
        assert!(words.is_complete(second) && !words.is_complete(own));
        // As many as may use it at the same time, and then one more for each that has ended.
        let last = 13 + Id::from(PARTIES);
        for session in 14..last - 1 {
            party(&mut shares, session).unwrap();
        }
        assert_eq!(party(&mut shares, last), Err(OUT_OF_MEMORY));
        end(&mut shares, 20);
        assert!(party(&mut shares, last).is_ok());
        end(&mut shares, 10);
        assert!(words.is_complete(own));
    }

    #[test]
    fn an_event_whose_file_may_shrink_or_cannot_be_written_is_not_shared() {
        let mut shares = Shares::default();
        let unsealed = shares.add(1, 10, &share(1), &mut Some(words_file()));
        assert_eq!(unsealed, Err(INVALID_VALUE));
        let read_only = words_file();
        fcntl_add_seals(&read_only, SealFlags::WRITE).unwrap();
        memory::seal_size(&read_only).unwrap();
        let read_only = shares.add(1, 10, &share(1), &mut Some(read_only));
        assert_eq!(read_only, Err(INVALID_VALUE));
        let (pipe, _) = std::io::pipe().unwrap();
        assert_eq!(
            shares.add(1, 10, &share(1), &mut Some(pipe.into())),
            Err(INVALID_VALUE)
        );
    }
}
