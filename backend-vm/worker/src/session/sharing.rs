//! Objects shared between the processes of one guest.

use std::collections::HashMap;
use std::sync::Arc;

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::{
    CloseAllocation, CuResult, DevicePtr, Event as EventKind, Handle, Memory, OpenAllocation,
    OpenAllocationReply, OpenEvent, OpenMemory, OpenMemoryReply, OpenPointer, OpenPointerReply,
    OpenPool, Outcome, Pool, Serve, ShareAddress, ShareAddressReply, ShareEvent, ShareEventReply,
    ShareMemory, ShareMemoryReply, SharePool, SharePoolReply, SharedAddress, SharedEventCreate,
};
use wormhole_device::{Device, RawEvent};

use super::addresses::{Source, admitted};
use super::{Answer, Call, Session};
use crate::devices::SessionDevice;
use crate::exchange::{Exchange, Token, What};
use crate::objects::EventObject;
use crate::registrar::{Registrar, Task};

/// A shared object of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Allocation(u64),
    /// Allocation from a pool.
    Pointer(u64),
    Event(Handle<EventKind>),
    Memory(Handle<Memory>),
    Pool(Handle<Pool>),
}

impl Key {
    fn what(self) -> What {
        match self {
            Self::Allocation(_) => What::Allocation,
            Self::Pointer(_) => What::Pointer,
            Self::Event(_) => What::Event,
            Self::Memory(_) => What::Memory,
            Self::Pool(_) => What::Pool,
        }
    }
}

/// Objects that the session shares with the tenant's other processes.
#[derive(Debug)]
pub(super) struct Shares {
    /// Connection to the other processes.
    exchange: Exchange,
    /// Token of each shared object.
    tokens: HashMap<Key, Token>,
    /// Further tokens of the same objects.
    further: Vec<(Key, Token)>,
}

impl Default for Shares {
    fn default() -> Self {
        Self {
            exchange: Exchange::none(),
            tokens: HashMap::new(),
            further: Vec::new(),
        }
    }
}

impl Shares {
    pub fn share_by(&mut self, exchange: Exchange) {
        self.exchange = exchange;
    }

    /// Enters the token of an object.
    fn enter(&mut self, key: Key, token: Token) {
        let before = self.tokens.insert(key, token);
        // Two threads shared the object at the same time, and both tokens are in use.
        if let Some(before) = before.filter(|before| *before != token) {
            tracing::debug!("{key:?} is shared twice");
            self.further.push((key, before));
        }
    }

    /// Withdraws an object that was destroyed, or is no longer to be shared.
    pub fn unshare(&mut self, key: Key, registrar: &Registrar) {
        let tokens = self.forget(key);
        if tokens.is_empty() {
            return;
        }
        let exchange = self.exchange.clone();
        // On the registrar, because the executor does not wait for the supervisor.
        registrar.run(Task::new(move |_| {
            for token in tokens {
                exchange.unshare(key.what(), token);
            }
        }));
    }

    /// Returns whether mappable memory is shared.
    pub fn shares_memory(&self, memory: Handle<Memory>) -> bool {
        self.tokens.contains_key(&Key::Memory(memory))
    }

    /// Forgets the tokens of mappable memory, if it has any. The returned closure withdraws them, and blocks until
    /// no other process holds the memory through the supervisor.
    pub fn unsharing(&mut self, memory: Handle<Memory>) -> Option<impl FnOnce() + Send + use<>> {
        let tokens = self.forget(Key::Memory(memory));
        if tokens.is_empty() {
            return None;
        }
        let exchange = self.exchange.clone();
        Some(move || {
            for token in tokens {
                exchange.unshare(What::Memory, token);
            }
        })
    }

    fn forget(&mut self, key: Key) -> Vec<Token> {
        let further = self.further.extract_if(.., |(other, _)| *other == key);
        let mut tokens: Vec<Token> = further.map(|(_, token)| token).collect();
        tokens.extend(self.tokens.remove(&key));
        tokens
    }

    /// Withdraws the objects of a context that is going to be reset.
    pub fn unshare_context(&mut self, registrar: &Registrar) {
        let own = |key: &&Key| matches!(key, Key::Allocation(_) | Key::Event(_));
        let gone: Vec<Key> = self.tokens.keys().filter(own).copied().collect();
        for key in gone {
            self.unshare(key, registrar);
        }
    }

    /// Returns whether this process itself shared the object: a process may not open memory and
    /// events that it shares.
    fn is_own(&self, token: Token) -> bool {
        self.tokens.values().any(|own| *own == token)
    }
}

impl Session {
    /// Shares an object. Repeated calls return the same token.
    fn share<R>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        key: Key,
        share: impl FnOnce(&dyn Device) -> wormhole_device::Result<wormhole_device::Shared>
        + Send
        + 'static,
        reply: impl FnOnce(Token) -> Answer + Send + 'static,
    ) -> Outcome<R> {
        let known = self.shares.tokens.get(&key).copied();
        let exchange = self.shares.exchange.clone();
        self.ask(
            call,
            device,
            move |device| match known {
                Some(token) => Ok(token),
                None => exchange.share(key.what(), share(device)?),
            },
            move |session, token| {
                session.shares.enter(key, token);
                if !session.holds(key) {
                    session.shares.unshare(key, &session.registrar);
                }
                reply(token)
            },
        )
    }

    fn holds(&self, key: Key) -> bool {
        match key {
            Key::Allocation(address) => {
                self.addresses.holds(Source::Context, address)
                    || self.addresses.slabs.holds(address)
            }
            Key::Pointer(address) => self.addresses.holds(Source::Pool, address),
            Key::Event(event) => self.objects.events.find(event).is_some(),
            Key::Memory(memory) => self.objects.memories.find(memory).is_some(),
            Key::Pool(pool) => self.objects.pools.find(pool).is_some(),
        }
    }
}

impl Serve<ShareAddress> for Session {
    fn serve(&mut self, call: &Call, message: &ShareAddress) -> Outcome<ShareAddressReply> {
        let address = message.address.0;
        let reply = |token| Answer::reply(&ShareAddressReply { token });
        match message.what {
            SharedAddress::Allocation => {
                // The driver shares whole allocations, and a slab is one.
                let (whole, owner) = match self.addresses.share_part(address) {
                    Some(slab) => slab,
                    None => {
                        let owner = self.addresses.owner(Source::Context, address)?;
                        (address, owner.clone())
                    }
                };
                let share = move |device: &dyn Device| device.share_allocation(whole);
                self.share(call, owner, Key::Allocation(whole), share, reply)
            }
            SharedAddress::Pointer => {
                let owner = self.addresses.owner(Source::Pool, address)?.clone();
                let share = move |device: &dyn Device| device.share_pointer(address);
                self.share(call, owner, Key::Pointer(address), share, reply)
            }
        }
    }
}

impl Serve<OpenAllocation> for Session {
    fn serve(&mut self, call: &Call, message: &OpenAllocation) -> Outcome<OpenAllocationReply> {
        let token = message.token;
        if self.shares.is_own(token) {
            return Err(CuResult::INVALID_CONTEXT);
        }
        let exchange = self.shares.exchange.clone();
        let number = call.device;
        self.ask(
            call,
            self.here(call),
            move |device| {
                let found = exchange.fetch(What::Allocation, token)?;
                let (address, bytes) = device.open_allocation(found)?;
                let address = admitted(address, bytes, |address| device.close_allocation(address))?;
                Ok((address, bytes))
            },
            move |session, (address, bytes)| {
                if !session.addresses.open(number, address, bytes) {
                    tracing::error!("the device opened {bytes} bytes at {address:#x} twice");
                    return Answer::failed(CuResult::UNKNOWN);
                }
                let address = DevicePtr(address);
                Answer::reply(&OpenAllocationReply { address, bytes })
            },
        )
    }
}

/// Closes an opened allocation, so that it may not be named any more.
impl Serve<CloseAllocation> for Session {
    fn serve(&mut self, call: &Call, message: &CloseAllocation) -> Outcome<()> {
        let address = message.address.0;
        let owner = self.addresses.close(address)?;
        self.free(call, self.devices[owner].clone(), move |device| {
            device.close_allocation(address)
        })
    }
}

impl Serve<ShareEvent> for Session {
    fn serve(&mut self, call: &Call, message: &ShareEvent) -> Outcome<ShareEventReply> {
        let handle = message.event;
        let event = Arc::clone(self.objects.events.get(handle)?);
        self.share(
            call,
            event.device.clone(),
            Key::Event(handle),
            move |device| device.share_event(event.raw),
            |token| Answer::reply(&ShareEventReply { token }),
        )
    }
}

impl Serve<OpenEvent> for Session {
    fn serve(&mut self, call: &Call, message: &OpenEvent) -> Outcome<()> {
        let (new, token) = (message.new, message.token);
        if self.shares.is_own(token) {
            return Err(CuResult::INVALID_CONTEXT);
        }
        let exchange = self.shares.exchange.clone();
        let open =
            move |device: &dyn Device| device.open_event(exchange.fetch(What::Event, token)?);
        self.make_shared_event(call, new, open)
    }
}

impl Serve<SharedEventCreate> for Session {
    fn serve(&mut self, call: &Call, message: &SharedEventCreate) -> Outcome<()> {
        let new = message.new;
        let create = |device: &dyn Device| device.create_event(INTERPROCESS | DISABLE_TIMING);
        self.make_shared_event(call, new, create)
    }
}

impl Session {
    fn make_shared_event(
        &mut self,
        call: &Call,
        new: Handle<EventKind>,
        make: impl FnOnce(&dyn Device) -> wormhole_device::Result<RawEvent> + Send + 'static,
    ) -> Outcome<()> {
        let device = self.here(call);
        self.ask(call, device.clone(), make, move |session, raw| {
            let event = EventObject {
                device,
                raw,
                of_launches: false,
                shared: true,
            };
            Answer::of(session.enter_event(new, event))
        })
    }
}

impl Serve<ShareMemory> for Session {
    fn serve(&mut self, call: &Call, message: &ShareMemory) -> Outcome<ShareMemoryReply> {
        let handle = message.memory;
        let memory = Arc::clone(self.objects.memories.get(handle)?);
        // Until its token is entered, the memory is neither released nor named by another handle.
        let kept = Arc::clone(&memory);
        self.share(
            call,
            memory.device().clone(),
            Key::Memory(handle),
            move |device| device.share_memory(memory.raw(), memory.bytes()),
            move |token| {
                drop(kept);
                Answer::reply(&ShareMemoryReply { token })
            },
        )
    }
}

impl Serve<OpenMemory> for Session {
    fn serve(&mut self, call: &Call, message: &OpenMemory) -> Outcome<OpenMemoryReply> {
        let (new, token) = (message.new, message.token);
        let exchange = self.shares.exchange.clone();
        let device = self.here(call);
        self.ask(
            call,
            device.clone(),
            move |device| device.open_memory(exchange.fetch(What::Memory, token)?),
            move |session, (raw, bytes)| {
                let memory = session
                    .addresses
                    .virtual_memory
                    .memory_object(device, raw, bytes);
                match session.objects.memories.enter(new, memory) {
                    Ok(()) => Answer::reply(&OpenMemoryReply { bytes }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }
}

impl Serve<SharePool> for Session {
    fn serve(&mut self, call: &Call, message: &SharePool) -> Outcome<SharePoolReply> {
        let handle = message.pool;
        let pool = Arc::clone(self.objects.pools.get(handle)?);
        self.share(
            call,
            pool.device().clone(),
            Key::Pool(handle),
            move |device| device.share_pool(pool.raw()),
            |token| Answer::reply(&SharePoolReply { token }),
        )
    }
}

impl Serve<OpenPool> for Session {
    fn serve(&mut self, call: &Call, message: &OpenPool) -> Outcome<()> {
        let (new, token) = (message.new, message.token);
        let exchange = self.shares.exchange.clone();
        let open = move |device: &dyn Device| device.open_pool(exchange.fetch(What::Pool, token)?);
        self.enter_pool(call, new, false, open)
    }
}

impl Serve<OpenPointer> for Session {
    fn serve(&mut self, call: &Call, message: &OpenPointer) -> Outcome<OpenPointerReply> {
        let (exchange, token) = (self.shares.exchange.clone(), message.token);
        let owner = self.objects.pools.get(message.pool)?.device().clone();
        self.ask_pool(
            call,
            message.pool,
            move |device, pool| {
                let found = exchange.fetch(What::Pointer, token)?;
                let (address, bytes) = device.open_pointer(pool, found)?;
                let address = admitted(address, bytes, |address| device.mem_free(address))?;
                Ok((address, bytes))
            },
            move |session, (address, bytes)| {
                let entered = session.addresses.enter(Source::Pool, owner, address, bytes);
                let address = DevicePtr(address);
                match entered {
                    Ok(()) => Answer::reply(&OpenPointerReply { address, bytes }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }
}
