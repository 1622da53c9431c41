//! Tests every decoding error, and the result that the program gets.

use wormhole_api::handle::Key;
use wormhole_api::*;

fn encoded(value: &impl Encode) -> Vec<u8> {
    value.encode(|parts| parts.concat()).expect("it fits")
}

fn event(index: u32) -> Handle<Event> {
    Handle::new(Key {
        index,
        generation: 0,
    })
    .expect("in range")
}

fn put(body: &mut [u8], offset: usize, bytes: &[u8]) {
    body[offset..offset + bytes.len()].copy_from_slice(bytes);
}

#[test]
fn a_handle_of_another_type_is_an_invalid_handle() {
    let mut body = encoded(&EventQuery { event: event(5) });
    let stream = Handle::<Stream>::new(Key {
        index: 5,
        generation: 0,
    })
    .expect("in range");
    put(&mut body, 0, &stream.to_wire().to_le_bytes());
    let error = decode(EventQuery::ID, &body).expect_err("a stream is no event");
    assert_eq!(
        error,
        DecodeError::Handle {
            message: "EventQuery",
            field: "event",
            value: stream.to_wire()
        }
    );
    assert_eq!(error.result(), Some(CuResult::INVALID_HANDLE));
}

#[test]
fn handles_with_low_or_high_bits_set_are_no_handles() {
    let good = event(5).to_wire();
    for bad in [good | 1, good | 1 << 42, good | 1 << 63, 0, 1, 2, u64::MAX] {
        assert!(
            decode(EventQuery::ID, &bad.to_le_bytes()).is_err(),
            "{bad:#x} was taken"
        );
    }
}

#[test]
fn only_streams_may_be_the_legacy_one_and_it_cannot_be_created() {
    assert!(decode(StreamQuery::ID, &1_u64.to_le_bytes()).is_ok());
    let create = StreamCreate {
        new: Handle::new(Key {
            index: 0,
            generation: 0,
        })
        .expect("in range"),
        flags: 0,
        priority: 0,
    };
    let mut body = encoded(&create);
    assert!(decode(StreamCreate::ID, &body).is_ok());
    put(&mut body, 0, &1_u64.to_le_bytes());
    let error = decode(StreamCreate::ID, &body).expect_err("the legacy stream exists");
    assert_eq!(error.result(), Some(CuResult::INVALID_HANDLE));
}

#[test]
fn a_value_outside_its_enum_is_an_invalid_value() {
    let set = MemSet {
        destination: DevicePtr(0x1000),
        pitch: 0,
        width: 4,
        height: 1,
        value: 7,
        element: Element::Word,
        stream: Handle::LEGACY,
    };
    let mut body = encoded(&set);
    put(&mut body, 36, &3_u32.to_le_bytes());
    let error = decode(MemSet::ID, &body).expect_err("no element has three bytes");
    assert_eq!(
        error,
        DecodeError::Value {
            message: "MemSet",
            field: "element",
            value: 3
        }
    );
    assert_eq!(error.result(), Some(CuResult::INVALID_VALUE));
}

#[test]
fn a_fence_out_of_range_is_an_invalid_value() {
    let write = FenceWrite {
        stream: Handle::LEGACY,
        fence: Fence::new(FENCES - 1).expect("the last one"),
        value: 1,
    };
    let mut body = encoded(&write);
    put(&mut body, 8, &FENCES.to_le_bytes());
    let error = decode(FenceWrite::ID, &body).expect_err("there is no such fence");
    assert_eq!(error.result(), Some(CuResult::INVALID_VALUE));
}

#[test]
fn counts_are_held_against_their_limit_and_the_body() {
    let write = MemWrite {
        destination: DevicePtr(64),
        stream: Handle::LEGACY,
        data: &[1, 2, 3],
    };
    let mut body = encoded(&write);
    put(&mut body, 16, &4_u32.to_le_bytes());
    let cut = decode(MemWrite::ID, &body).expect_err("three bytes are not four");
    assert_eq!(
        cut,
        DecodeError::Cut {
            message: "MemWrite",
            tail: "data",
            count: 4,
            found: 3
        }
    );
    put(&mut body, 16, &4097_u32.to_le_bytes());
    let limit = decode(MemWrite::ID, &body).expect_err("4096 is the limit");
    assert_eq!(
        limit,
        DecodeError::Limit {
            message: "MemWrite",
            tail: "data",
            count: 4097,
            limit: 4096
        }
    );
    for error in [cut, limit, decode(999, &[]).expect_err("no such message")] {
        assert_eq!(error.result(), None, "no frontend sends this: {error}");
    }
}

#[test]
fn a_tail_over_its_limit_is_not_sent() {
    let data = [0; 4097];
    let write = MemWrite {
        destination: DevicePtr(64),
        stream: Handle::LEGACY,
        data: &data,
    };
    let refused = write.encode(|_| panic!("it was sent"));
    let limit = EncodeError::Tail {
        message: "MemWrite",
        tail: "data",
        count: 4097,
        limit: 4096,
    };
    assert_eq!(refused, Err(limit));
    let text = [0; 2500];
    let reply = SynchronizeReply {
        remaining: 0,
        stdout: &text,
        stderr: &text,
    };
    assert!(matches!(
        reply.encode(|_| panic!("it was sent")),
        Err(EncodeError::Total {
            message: "Synchronize",
            limit: REPLY_LIMIT,
            ..
        })
    ));
}

#[test]
fn an_outcome_is_answered_once_or_put_off() {
    let mut answers = Vec::new();
    let mut answer = |result: CuResult, parts: &[&[u8]]| answers.push((result, parts.concat()));
    let reply = MemAllocReply {
        address: DevicePtr(0x10),
    };
    let done = deliver(Ok(Served::Done(reply)), &mut answer);
    let failed = deliver::<MemAllocReply>(Err(CuResult::OUT_OF_MEMORY), &mut answer);
    let later = deliver::<()>(Ok(Served::Deferred), &mut answer);
    assert_eq!(
        (done, failed, later),
        (
            Dispatched::Answered,
            Dispatched::Answered,
            Dispatched::Deferred
        )
    );
    assert_eq!(
        answers,
        [
            (CuResult::SUCCESS, 0x10_u64.to_le_bytes().to_vec()),
            (CuResult::OUT_OF_MEMORY, Vec::new())
        ]
    );
}
