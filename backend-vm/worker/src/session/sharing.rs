//! What processes of one guest share.

use std::sync::Arc;

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::{
    CloseAllocation, CuResult, DevicePtr, Event as EventKind, Handle, Memory, OpenAllocation,
    OpenAllocationReply, OpenEvent, OpenMemory, OpenMemoryReply, OpenPointer, OpenPointerReply,
    OpenPool, Outcome, Pool, Serve, ShareAddress, ShareAddressReply, ShareEvent, ShareEventReply,
    ShareMemory, ShareMemoryReply, SharePool, SharePoolReply, SharedAddress, SharedEventCreate,
};
use wormhole_device::{Device, RawEvent};

use super::memory::in_bands;
use super::{Answer, Call, Session};
use crate::devices::SessionDevice;
use crate::exchange::{Token, What};
use crate::objects::EventObject;
use crate::registrar::Task;
use wormhole_link::counters::Counter;

/// Something of the session that is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Allocation(u64),
    /// An allocation of a pool.
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

impl Session {
    /// Shares something once; asked again the token is the same.
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
        let (exchange, known) = (self.exchange.clone(), self.shared.get(&key).copied());
        self.ask(
            call,
            device,
            move |device| match known {
                Some(token) => Ok(token),
                None => exchange.share(key.what(), share(device)?),
            },
            move |session, token| {
                let before = session.shared.insert(key, token);
                // Two threads shared it at the same time, and both tokens are out.
                if let Some(before) = before.filter(|before| *before != token) {
                    tracing::debug!("{key:?} is shared twice");
                    session.twice.push((key, before));
                }
                if !session.holds(key) {
                    session.unshare(key);
                }
                reply(token)
            },
        )
    }

    fn holds(&self, key: Key) -> bool {
        match key {
            Key::Allocation(address) => self.allocations.contains_key(&address),
            Key::Pointer(address) => self.pool_allocations.contains_key(&address),
            Key::Event(event) => self.events.get(event).is_some(),
            Key::Memory(memory) => self.memories.get(memory).is_some(),
            Key::Pool(pool) => self.pools.get(pool).is_some(),
        }
    }

    /// What was shared is gone, or is no longer to be shared.
    pub(super) fn unshare(&mut self, key: Key) {
        let tokens = self.forget_shared(key);
        if tokens.is_empty() {
            return;
        }
        let exchange = self.exchange.clone();
        // Off the executor, which waits for no supervisor.
        self.registrar.run(Task::new(move |_| {
            for token in tokens {
                exchange.unshare(key.what(), token);
            }
        }));
    }

    /// The same for mappable memory; its job waits until nothing outside holds it any more.
    pub(super) fn unsharing(&mut self, memory: Handle<Memory>) -> impl FnOnce() + Send + 'static {
        let tokens = self.forget_shared(Key::Memory(memory));
        let exchange = self.exchange.clone();
        move || {
            for token in tokens {
                exchange.unshare(What::Memory, token);
            }
        }
    }

    fn forget_shared(&mut self, key: Key) -> Vec<Token> {
        let twice = self.twice.extract_if(.., |(other, _)| *other == key);
        let mut tokens: Vec<Token> = twice.map(|(_, token)| token).collect();
        tokens.extend(self.shared.remove(&key));
        tokens
    }

    /// The context goes, and what belongs to it.
    pub(super) fn unshare_context(&mut self) {
        let own = |key: &&Key| matches!(key, Key::Allocation(_) | Key::Event(_));
        let gone: Vec<Key> = self.shared.keys().filter(own).copied().collect();
        for key in gone {
            self.unshare(key);
        }
        self.opened.clear();
    }

    /// Whether this process itself has shared it: memory and events are not opened by who has them.
    fn is_own(&self, token: Token) -> bool {
        self.shared.values().any(|own| *own == token)
    }
}

impl Serve<ShareAddress> for Session {
    fn serve(&mut self, call: &Call, message: &ShareAddress) -> Outcome<ShareAddressReply> {
        let address = message.address.0;
        let reply = |token| Answer::reply(&ShareAddressReply { token });
        match message.what {
            SharedAddress::Allocation => {
                let owner = self.allocations.get(&address).cloned();
                let owner = owner.ok_or_else(|| self.invalid_address())?;
                let share = move |device: &dyn Device| device.share_allocation(address);
                self.share(call, owner, Key::Allocation(address), share, reply)
            }
            SharedAddress::Pointer => {
                let allocation = self.pool_allocations.get(&address).cloned();
                let (owner, _) = allocation.ok_or_else(|| self.invalid_address())?;
                let share = move |device: &dyn Device| device.share_pointer(address);
                self.share(call, owner, Key::Pointer(address), share, reply)
            }
        }
    }
}

impl Serve<OpenAllocation> for Session {
    fn serve(&mut self, call: &Call, message: &OpenAllocation) -> Outcome<OpenAllocationReply> {
        let token = message.token;
        if self.is_own(token) {
            return Err(CuResult::INVALID_CONTEXT);
        }
        let exchange = self.exchange.clone();
        let number = call.device;
        self.ask(
            call,
            self.here(call),
            move |device| {
                let found = exchange.fetch(What::Allocation, token)?;
                let (address, bytes) = device.open_allocation(found)?;
                if in_bands(address, bytes) {
                    return Ok((address, bytes));
                }
                tracing::error!("the device opened {address:#x}, which a guest may use itself");
                device.close_allocation(address)?;
                Err(CuResult::OUT_OF_MEMORY)
            },
            move |session, (address, bytes)| {
                if !session.opened.insert_of(number, address, bytes) {
                    tracing::error!("the device opened {bytes} bytes at {address:#x} twice");
                    return Answer::failed(CuResult::UNKNOWN);
                }
                let address = DevicePtr(address);
                Answer::reply(&OpenAllocationReply { address, bytes })
            },
        )
    }
}

/// As with memory that is freed, it may not be named from here on.
impl Serve<CloseAllocation> for Session {
    fn serve(&mut self, call: &Call, message: &CloseAllocation) -> Outcome<()> {
        let address = message.address.0;
        let Some((_, owner)) = self.opened.remove(address) else {
            return Err(self.invalid_address());
        };
        self.ask(
            call,
            self.devices[owner].clone(),
            move |device| device.close_allocation(address),
            |_, ()| Answer::done(),
        )
    }
}

impl Serve<ShareEvent> for Session {
    fn serve(&mut self, call: &Call, message: &ShareEvent) -> Outcome<ShareEventReply> {
        let handle = message.event;
        let event = Arc::clone(self.event(handle)?);
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
        if self.is_own(token) {
            return Err(CuResult::INVALID_CONTEXT);
        }
        let exchange = self.exchange.clone();
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
            let event = Arc::new(EventObject {
                device,
                raw,
                of_launches: false,
            });
            match session.events.insert(new, Arc::clone(&event)) {
                Ok(()) => Answer::done(),
                Err(error) => {
                    session.counters.add(Counter::InvalidHandles, 1);
                    let _ = event.device.destroy_event(raw);
                    Answer::failed(error.into())
                }
            }
        })
    }
}

impl Serve<ShareMemory> for Session {
    fn serve(&mut self, call: &Call, message: &ShareMemory) -> Outcome<ShareMemoryReply> {
        let handle = message.memory;
        let memory = Arc::clone(self.memory(handle)?);
        self.share(
            call,
            memory.device().clone(),
            Key::Memory(handle),
            move |device| device.share_memory(memory.raw(), memory.bytes()),
            |token| Answer::reply(&ShareMemoryReply { token }),
        )
    }
}

impl Serve<OpenMemory> for Session {
    fn serve(&mut self, call: &Call, message: &OpenMemory) -> Outcome<OpenMemoryReply> {
        let (new, token) = (message.new, message.token);
        let exchange = self.exchange.clone();
        let device = self.here(call);
        self.ask(
            call,
            device.clone(),
            move |device| device.open_memory(exchange.fetch(What::Memory, token)?),
            move |session, (raw, bytes)| {
                let memory = session.memory_object(device, raw, bytes);
                match session.memories.insert(new, memory) {
                    Ok(()) => Answer::reply(&OpenMemoryReply { bytes }),
                    Err(error) => {
                        session.counters.add(Counter::InvalidHandles, 1);
                        Answer::failed(error.into())
                    }
                }
            },
        )
    }
}

impl Serve<SharePool> for Session {
    fn serve(&mut self, call: &Call, message: &SharePool) -> Outcome<SharePoolReply> {
        let handle = message.pool;
        let pool = Arc::clone(self.pool(handle)?);
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
        let exchange = self.exchange.clone();
        let open = move |device: &dyn Device| device.open_pool(exchange.fetch(What::Pool, token)?);
        self.enter_pool(call, new, false, open)
    }
}

impl Serve<OpenPointer> for Session {
    fn serve(&mut self, call: &Call, message: &OpenPointer) -> Outcome<OpenPointerReply> {
        let (exchange, token) = (self.exchange.clone(), message.token);
        let owner = self.pool(message.pool)?.device().clone();
        self.ask_pool(
            call,
            message.pool,
            move |device, pool| {
                let found = exchange.fetch(What::Pointer, token)?;
                let (address, bytes) = device.open_pointer(pool, found)?;
                if in_bands(address, bytes) {
                    return Ok((address, bytes));
                }
                tracing::error!("the device opened {address:#x}, which a guest may use itself");
                device.free(address)?;
                Err(CuResult::OUT_OF_MEMORY)
            },
            move |session, (address, bytes)| {
                if !session
                    .device_memory
                    .insert_of(owner.number(), address, bytes)
                {
                    tracing::error!("a pool showed {bytes} bytes at {address:#x} twice");
                    return Answer::failed(CuResult::UNKNOWN);
                }
                session.pool_allocations.insert(address, (owner, bytes));
                let address = DevicePtr(address);
                Answer::reply(&OpenPointerReply { address, bytes })
            },
        )
    }
}
