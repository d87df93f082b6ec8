//! Payloads of any bytes: no panic, and no more memory than the input's size allows.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sgl_kv_indexer::bridge::event::{Decoder, EVENT_BYTES_RATIO};

fuzz_target!(|payload: &[u8]| {
    let mut decoder = Decoder::default();
    let Ok(batch) = decoder.decode(payload) else { return };
    assert!(size_of_val(batch.events) <= EVENT_BYTES_RATIO * payload.len());
    for event in batch.events {
        assert_eq!(batch.hashes(event).count(), event.hashes as usize);
    }
});
