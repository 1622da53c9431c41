//! Tests that no value is taken for a handle that was not minted as one.

use proptest::prelude::*;
use wormhole_api::handle::{BAND_SIZE, Context, GENERATIONS, HandleKind, INDICES, Key};
use wormhole_api::{Array, Event, Function, Handle, Library, Mipmap, Module, Stream};

const BAND: u64 = 0x4000_0000_0000;

fn round_trip<K: HandleKind>(key: Key) {
    let handle = Handle::<K>::new(key).expect("in range");
    assert_eq!(handle.key(), Some(key));
    assert_eq!(Handle::from_wire(handle.to_wire()), Some(handle));
    let pointer = handle.to_pointer(BAND);
    assert!((BAND..BAND + BAND_SIZE).contains(&pointer));
    assert_eq!(pointer % 64, 0);
    assert_eq!(Handle::from_pointer(BAND, pointer), Some(handle));
}

proptest! {
    #[test]
    fn every_key_makes_a_handle_of_each_type(index in 0..INDICES, generation in 0..GENERATIONS) {
        let key = Key { index, generation };
        round_trip::<Stream>(key);
        round_trip::<Event>(key);
        round_trip::<Module>(key);
        round_trip::<Library>(key);
        round_trip::<Function>(key);
        round_trip::<Context>(key);
        round_trip::<Array>(key);
        round_trip::<Mipmap>(key);
        let event = Handle::<Event>::new(key).expect("in range");
        prop_assert_eq!(Handle::<Stream>::from_wire(event.to_wire()), None);
        prop_assert_eq!(Handle::<Module>::from_pointer(BAND, event.to_pointer(BAND)), None);
    }

    #[test]
    fn whatever_is_taken_for_a_handle_is_the_handle_of_its_key(bits in any::<u64>()) {
        if let Some(handle) = Handle::<Event>::from_wire(bits) {
            let key = handle.key().expect("events have no legacy one");
            prop_assert_eq!(Handle::<Event>::new(key).map(Handle::to_wire), Some(bits));
        }
    }
}

#[test]
fn keys_out_of_range_make_no_handle() {
    assert!(
        Handle::<Event>::new(Key {
            index: INDICES,
            generation: 0
        })
        .is_none()
    );
    assert!(
        Handle::<Event>::new(Key {
            index: 0,
            generation: GENERATIONS
        })
        .is_none()
    );
}

#[test]
fn the_special_streams_are_not_minted() {
    for special in [0, 1, 2] {
        assert_eq!(Handle::<Stream>::from_pointer(BAND, special), None);
    }
    assert_eq!(Handle::<Stream>::from_wire(1), Some(Handle::LEGACY));
    assert_eq!(Handle::<Stream>::LEGACY.to_pointer(BAND), 1);
    assert!(Handle::<Stream>::LEGACY.is_legacy());
}
