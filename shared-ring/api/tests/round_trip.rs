//! Tests that encoding and decoding are inverse, and that other bodies are refused.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use wormhole_api::handle::{GENERATIONS, HandleKind, INDICES, Key};
use wormhole_api::*;

fn handle<K: HandleKind>() -> impl Strategy<Value = Handle<K>> {
    (0..INDICES, 0..GENERATIONS)
        .prop_map(|(index, generation)| Handle::new(Key { index, generation }).expect("in range"))
}

fn fence() -> impl Strategy<Value = Fence> {
    (0..FENCES).prop_map(|index| Fence::new(index).expect("in range"))
}

fn encoded(value: &impl Encode) -> Vec<u8> {
    value.encode(|parts| parts.concat()).expect("it fits")
}

/// Checks that a message decodes, and that its prefixes and longer bodies are refused.
fn message(id: u16, value: &impl Encode, expected: Request<'_>) -> Result<(), TestCaseError> {
    let body = encoded(value);
    prop_assert!(body.len() <= MESSAGE_LIMIT);
    prop_assert_eq!(decode(id, &body), Ok(expected));
    prop_assert_eq!(expected.info().id, id);
    for length in [0, body.len() / 2, body.len().saturating_sub(1)] {
        if let Some(prefix) = body
            .get(..length)
            .filter(|prefix| prefix.len() < body.len())
        {
            prop_assert!(
                decode(id, prefix).is_err(),
                "{} bytes of {} were taken",
                length,
                body.len()
            );
        }
    }
    let longer = [&body[..], &[0]].concat();
    let long = matches!(decode(id, &longer), Err(DecodeError::Long { extra: 1, .. }));
    prop_assert!(long, "a byte too many was taken");
    Ok(())
}

fn reply<'a, R>(value: &R, body: &'a mut Vec<u8>) -> Result<(), TestCaseError>
where
    R: Encode + Decode<'a> + PartialEq + std::fmt::Debug,
{
    *body = encoded(value);
    prop_assert!(body.len() <= REPLY_LIMIT);
    let decoded = R::decode(body);
    prop_assert_eq!(decoded.as_ref(), Ok(value));
    Ok(())
}

include!(concat!(env!("OUT_DIR"), "/round_trips.rs"));

proptest! {
    #[test]
    fn random_bytes_never_panic(
        message in prop::sample::select(MESSAGES).prop_map(|info| info.id),
        body in prop::collection::vec(any::<u8>(), 0..256),
    ) {
        if let Err(error) = decode(message, &body) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn a_launch_with_any_byte_changed_is_a_launch_or_an_error(
        place in 0_usize..200,
        byte in any::<u8>(),
        parameters in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let attributes = [LaunchAttribute { id: 4, reserved: 0, value: [7; 64] }];
        let launch = LaunchKernel {
            function: Handle::new(Key { index: 3, generation: 1 }).expect("in range"),
            stream: Handle::LEGACY,
            grid: [1, 2, 3],
            block: [32, 1, 1],
            shared: 0,
            attributes: Items::new(&attributes),
            parameters: &parameters,
        };
        let mut body = encoded(&launch);
        let place = place % body.len();
        body[place] = byte;
        match decode(LaunchKernel::ID, &body) {
            Ok(Request::LaunchKernel(changed)) => prop_assert!(
                changed.grid.iter().chain(&changed.block).all(|size| *size != 0)
            ),
            Ok(other) => prop_assert!(false, "{:?} is no launch", other),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
