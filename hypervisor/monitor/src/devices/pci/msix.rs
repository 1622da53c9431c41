//! Implements message-signalled interrupts (MSI-X): table, pending bits, and the routes in KVM.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;
use wormhole_lock::Mutex;

use crate::irq::{IrqError, MsiController, MsiMessage};

/// Vector number with which a virtio driver disables an interrupt (`VIRTIO_MSI_NO_VECTOR`).
pub const NO_VECTOR: u16 = 0xffff;
/// Bytes of a table entry.
const ENTRY: usize = 16;
/// Bit of vector control: this vector is masked.
const ENTRY_MASKED: u8 = 1;
/// Bit of message control's high byte: MSI-X is enabled.
const ENABLED: u8 = 1 << 7;
/// Bit of message control's high byte: all vectors are masked.
const ALL_MASKED: u8 = 1 << 6;

#[derive(Debug)]
struct Vector {
    entry: [u8; ENTRY],
    msi: usize,
    event: EventFd,
    pending: bool,
    /// Message that is currently routed.
    routed: Option<MsiMessage>,
    /// Whether the eventfd raises the interrupt in KVM.
    connected: bool,
}

/// State of the interrupts of one function.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub struct MsixState {
    control: u8,
    /// Table entry of each vector, and whether it is pending.
    vectors: Vec<([u8; ENTRY], bool)>,
}

#[derive(Debug)]
struct State {
    control: u8,
    vectors: Vec<Vector>,
}

/// MSI-X vectors of a function. The vCPU threads write the table, device threads trigger vectors.
///
/// The vectors of a device of the host are triggered by its eventfds. KVM delivers these without the monitor, so that a
/// masked vector's eventfd is not connected to KVM.
#[derive(Debug)]
pub struct Msix {
    router: Arc<dyn MsiController>,
    /// Whether a device of the host triggers the vectors.
    is_of_hardware: bool,
    state: Mutex<State>,
}

impl Msix {
    /// Bit of message control's high byte: MSI-X is enabled.
    pub const ENABLED: u8 = ENABLED;

    /// Creates a table of `count` vectors, all masked.
    pub fn new(router: Arc<dyn MsiController>, count: usize) -> Result<Self, IrqError> {
        Self::of(router, count, false)
    }

    /// Creates a table of vectors that a device of the host triggers.
    pub fn of_hardware(router: Arc<dyn MsiController>, count: usize) -> Result<Self, IrqError> {
        Self::of(router, count, true)
    }

    fn of(
        router: Arc<dyn MsiController>,
        count: usize,
        is_of_hardware: bool,
    ) -> Result<Self, IrqError> {
        let mut vectors = Vec::new();
        for _ in 0..count {
            let (msi, event) = router.allocate_msi()?;
            if is_of_hardware {
                router.disconnect_msi(msi, &event)?;
            }
            let mut entry = [0; ENTRY];
            entry[12] = ENTRY_MASKED;
            vectors.push(Vector {
                entry,
                msi,
                event,
                pending: false,
                routed: None,
                connected: !is_of_hardware,
            });
        }
        Ok(Self {
            router,
            is_of_hardware,
            state: Mutex::new(State {
                control: 0,
                vectors,
            }),
        })
    }

    /// Returns the body of the capability (after id and next pointer) and the mask of its writable bits.
    /// `table` and `pending` are offsets in BAR 0.
    pub fn capability(&self, table: u32, pending: u32) -> ([u8; 10], [u8; 2]) {
        let count = self.state.lock().vectors.len();
        let mut body = [0; 10];
        let size = u16::try_from(count.saturating_sub(1)).unwrap_or(0);
        body[..2].copy_from_slice(&size.to_le_bytes());
        body[2..6].copy_from_slice(&table.to_le_bytes());
        body[6..].copy_from_slice(&pending.to_le_bytes());
        (body, [0, ENABLED | ALL_MASKED])
    }

    /// Sets the high byte of message control.
    pub fn set_control(&self, control: u8) {
        let mut state = self.state.lock();
        state.control = control;
        self.apply(&mut state);
    }

    /// Returns whether `vector` exists.
    pub fn has(&self, vector: u16) -> bool {
        usize::from(vector) < self.state.lock().vectors.len()
    }

    /// Raises a vector, or sets its pending bit if it is masked or MSI-X is disabled. Ignores `NO_VECTOR`
    /// and unknown vectors.
    pub fn trigger(&self, vector: u16) {
        let mut state = self.state.lock();
        let deliverable = state.control & (ENABLED | ALL_MASKED) == ENABLED;
        if let Some(vector) = state.vectors.get_mut(usize::from(vector)) {
            if deliverable && !vector.masked() {
                vector.raise();
            } else {
                vector.pending = true;
            }
        }
    }

    /// Passes the eventfds of all vectors, in their order.
    pub fn with_events<T>(&self, use_events: impl FnOnce(Vec<&EventFd>) -> T) -> T {
        let state = self.state.lock();
        use_events(state.vectors.iter().map(|vector| &vector.event).collect())
    }

    /// Clears the pending bits: the device that set them was reset.
    pub fn forget_pending(&self) {
        for vector in &mut self.state.lock().vectors {
            vector.pending = false;
        }
    }

    /// Returns whether the guest has enabled MSI-X.
    pub fn is_enabled(&self) -> bool {
        self.state.lock().control & ENABLED != 0
    }

    /// Reads the table.
    pub fn read_table(&self, offset: usize, data: &mut [u8]) {
        let state = self.state.lock();
        for (index, byte) in data.iter_mut().enumerate() {
            let at = offset + index;
            *byte = state
                .vectors
                .get(at / ENTRY)
                .map_or(0, |vector| vector.entry[at % ENTRY]);
        }
    }

    /// Writes the table.
    pub fn write_table(&self, offset: usize, data: &[u8]) {
        let mut state = self.state.lock();
        for (index, value) in data.iter().enumerate() {
            let at = offset + index;
            if let Some(vector) = state.vectors.get_mut(at / ENTRY) {
                vector.entry[at % ENTRY] = *value;
            }
        }
        self.apply(&mut state);
    }

    /// Reads the pending bits.
    pub fn read_pending(&self, offset: usize, data: &mut [u8]) {
        let mut state = self.state.lock();
        for vector in state.vectors.iter_mut().filter(|vector| !vector.connected) {
            // It counts only while KVM does not take what it counts.
            vector.pending |= vector.event.read().is_ok();
        }
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = (0..8)
                .filter(|bit| {
                    state
                        .vectors
                        .get((offset + index) * 8 + bit)
                        .is_some_and(|vector| vector.pending)
                })
                .fold(0, |bits, bit| bits | 1 << bit);
        }
    }

    /// Returns the state.
    pub fn save(&self) -> MsixState {
        let state = self.state.lock();
        let vectors = state.vectors.iter();
        MsixState {
            control: state.control,
            vectors: vectors
                .map(|vector| (vector.entry, vector.pending))
                .collect(),
        }
    }

    /// Takes a state, and routes the vectors that it has unmasked. Returns false, and changes nothing, if it has another
    /// number of vectors.
    pub fn restore(&self, saved: &MsixState) -> bool {
        let mut state = self.state.lock();
        if saved.vectors.len() != state.vectors.len() {
            return false;
        }
        state.control = saved.control;
        for (vector, (entry, pending)) in state.vectors.iter_mut().zip(&saved.vectors) {
            vector.entry = *entry;
            vector.pending = *pending;
        }
        self.apply(&mut state);
        true
    }

    /// Routes unmasked vectors and raises those that are pending.
    fn apply(&self, state: &mut State) {
        let deliverable = state.control & (ENABLED | ALL_MASKED) == ENABLED;
        for vector in &mut state.vectors {
            if !deliverable || vector.masked() {
                if self.is_of_hardware && vector.connected {
                    vector.disconnect(&*self.router);
                }
                continue;
            }
            // KVM waits for its readers (SRCU) on every change of the routes. A vector is therefore routed only if
            // its message changed, not on every write to the table.
            let message = vector.message();
            if vector.routed != Some(message) {
                // If KVM refuses a message, only the guest's own interrupt is lost.
                if let Err(error) = self.router.route_msi(vector.msi, message) {
                    tracing::debug!(%error, "the guest's MSI-X entry is not usable");
                    continue;
                }
                vector.routed = Some(message);
            }
            if !vector.connected {
                vector.connect(&*self.router);
            }
            if vector.pending {
                vector.pending = false;
                vector.raise();
            }
        }
    }
}

impl Vector {
    fn masked(&self) -> bool {
        self.entry[12] & ENTRY_MASKED != 0
    }

    fn message(&self) -> MsiMessage {
        let [a0, a1, a2, a3, a4, a5, a6, a7, d0, d1, d2, d3, ..] = self.entry;
        MsiMessage {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            data: u32::from_le_bytes([d0, d1, d2, d3]),
        }
    }

    fn connect(&mut self, router: &dyn MsiController) {
        match router.connect_msi(self.msi, &self.event) {
            Ok(()) => self.connected = true,
            Err(error) => tracing::debug!(%error, "an interrupt is not connected"),
        }
    }

    fn disconnect(&mut self, router: &dyn MsiController) {
        match router.disconnect_msi(self.msi, &self.event) {
            Ok(()) => self.connected = false,
            Err(error) => tracing::debug!(%error, "an interrupt stays connected"),
        }
    }

    fn raise(&self) {
        // A full counter means that the interrupt is pending anyway.
        if let Err(error) = self.event.write(1) {
            tracing::debug!(%error, "an interrupt's eventfd is full");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Controller that records routes and exposes the eventfds to the test.
    #[derive(Debug, Default)]
    pub(crate) struct FakeController(Mutex<Vec<FakeMsi>>);

    #[derive(Debug)]
    struct FakeMsi {
        event: EventFd,
        routes: Vec<MsiMessage>,
        is_connected: bool,
    }

    impl FakeController {
        pub(crate) fn raised(&self, index: usize) -> u64 {
            self.0.lock()[index].event.read().unwrap_or(0)
        }

        pub(crate) fn route(&self, index: usize) -> Option<MsiMessage> {
            self.0.lock()[index].routes.last().copied()
        }

        pub(crate) fn is_connected(&self, index: usize) -> bool {
            self.0.lock()[index].is_connected
        }

        fn routes(&self, index: usize) -> usize {
            self.0.lock()[index].routes.len()
        }
    }

    impl MsiController for FakeController {
        fn allocate_msi(&self) -> Result<(usize, EventFd), IrqError> {
            let event = EventFd::new(libc::EFD_NONBLOCK).map_err(IrqError::EventFd)?;
            let clone = event.try_clone().map_err(IrqError::EventFd)?;
            self.0.lock().push(FakeMsi {
                event,
                routes: Vec::new(),
                is_connected: true,
            });
            Ok((self.0.lock().len() - 1, clone))
        }

        fn route_msi(&self, index: usize, message: MsiMessage) -> Result<(), IrqError> {
            self.0.lock()[index].routes.push(message);
            Ok(())
        }

        fn connect_msi(&self, index: usize, _: &EventFd) -> Result<(), IrqError> {
            self.0.lock()[index].is_connected = true;
            Ok(())
        }

        fn disconnect_msi(&self, index: usize, _: &EventFd) -> Result<(), IrqError> {
            self.0.lock()[index].is_connected = false;
            Ok(())
        }
    }

    fn msix() -> (Arc<FakeController>, Msix) {
        let controller = Arc::new(FakeController::default());
        let msix =
            Msix::new(Arc::clone(&controller) as Arc<dyn MsiController>, 2).expect("eventfds");
        (controller, msix)
    }

    #[test]
    fn a_masked_vector_is_pending_until_it_is_unmasked() {
        let (controller, msix) = msix();
        msix.write_table(16, &0xfee0_0000u64.to_le_bytes());
        msix.write_table(24, &0x41u32.to_le_bytes());
        msix.set_control(ENABLED);
        msix.trigger(1);
        assert_eq!(controller.raised(1), 0);
        let mut pending = [0];
        msix.read_pending(0, &mut pending);
        assert_eq!(pending, [0b10]);
        msix.write_table(28, &0u32.to_le_bytes());
        assert_eq!(controller.raised(1), 1);
        let message = MsiMessage {
            address: 0xfee0_0000,
            data: 0x41,
        };
        assert_eq!(controller.route(1), Some(message));
        msix.read_pending(0, &mut pending);
        assert_eq!(pending, [0]);
        assert_eq!(controller.raised(0), 0);
    }

    #[test]
    fn a_vector_is_routed_where_its_message_changes_and_not_by_every_write() {
        let (controller, msix) = msix();
        let routes = || [0, 1].map(|vector| controller.routes(vector));
        msix.set_control(ENABLED);
        let unmask = |vector: usize| msix.write_table(16 * vector + 12, &0u32.to_le_bytes());
        unmask(0);
        unmask(1);
        assert_eq!(routes(), [1, 1]);
        for _ in 0..100 {
            // An unchanged message, the vector's mask, and the function's mask.
            msix.write_table(0, &[0; 12]);
            msix.write_table(12, &1u32.to_le_bytes());
            unmask(0);
            msix.set_control(ENABLED | ALL_MASKED);
            msix.set_control(ENABLED);
        }
        assert_eq!(routes(), [1, 1]);
        msix.write_table(8, &7u32.to_le_bytes());
        assert_eq!(routes(), [2, 1]);
    }

    #[test]
    fn a_restored_vector_is_routed_and_raised_if_it_was_pending() {
        let (_, saved) = msix();
        saved.write_table(0, &0xfee0_0000u64.to_le_bytes());
        saved.write_table(12, &0u32.to_le_bytes());
        saved.set_control(ENABLED | ALL_MASKED);
        saved.trigger(0);
        saved.trigger(1);
        let (controller, restored) = msix();
        assert!(restored.restore(&saved.save()));
        assert_eq!(controller.raised(0), 0);
        restored.set_control(ENABLED);
        let address = controller.route(0).map(|message| message.address);
        assert_eq!((controller.raised(0), address), (1, Some(0xfee0_0000)));
        // The second one is still masked.
        let mut pending = [0];
        restored.read_pending(0, &mut pending);
        assert_eq!((controller.raised(1), pending), (0, [0b10]));
        let fewer = MsixState {
            control: ENABLED,
            vectors: Vec::new(),
        };
        assert!(!restored.restore(&fewer));
    }

    #[test]
    fn a_vector_of_hardware_is_connected_while_it_is_unmasked_and_pending_where_it_was_triggered_meanwhile()
     {
        let controller = Arc::new(FakeController::default());
        let router = Arc::clone(&controller) as Arc<dyn MsiController>;
        let msix = Msix::of_hardware(router, 2).expect("eventfds");
        let connected = || [0, 1].map(|vector| controller.is_connected(vector));
        let mask = |masked: u32| msix.write_table(12, &masked.to_le_bytes());
        mask(0);
        assert_eq!(connected(), [false, false], "MSI-X is disabled");
        msix.set_control(ENABLED);
        assert_eq!(connected(), [true, false]);
        assert!(controller.route(0).is_some() && controller.route(1).is_none());
        mask(1);
        assert_eq!(connected(), [false, false]);
        let pending = || {
            let mut pending = [0];
            msix.read_pending(0, &mut pending);
            pending[0]
        };
        assert_eq!(pending(), 0);
        // The device triggers it.
        msix.with_events(|events| events[0].write(1)).expect("room");
        assert_eq!((pending(), pending()), (1, 1));
        mask(0);
        assert_eq!((pending(), connected()), (0, [true, false]));
        assert_eq!(controller.raised(0), 1);
        msix.set_control(ENABLED | ALL_MASKED);
        assert_eq!(connected(), [false, false]);
    }

    #[test]
    fn the_function_mask_holds_everything_back() {
        let (controller, msix) = msix();
        msix.write_table(12, &0u32.to_le_bytes());
        msix.set_control(ENABLED | ALL_MASKED);
        msix.trigger(0);
        assert_eq!(controller.raised(0), 0);
        msix.set_control(ENABLED);
        assert_eq!(controller.raised(0), 1);
    }

    proptest! {
        #[test]
        fn no_access_panics(
            accesses in proptest::collection::vec((0usize..0x1000, proptest::collection::vec(any::<u8>(), 0..9), any::<u16>()), 0..50)
        ) {
            let (_, msix) = msix();
            for (offset, mut data, vector) in accesses {
                msix.write_table(offset, &data);
                msix.read_table(offset, &mut data);
                msix.read_pending(offset, &mut data);
                msix.set_control(vector.to_le_bytes()[0]);
                msix.trigger(vector % 4);
            }
        }
    }
}
