//! A peer of any bytes: no panic, whatever it declares.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sgl_kv_indexer::bridge::zmtp::wire::{Item, Reader, command};

fuzz_target!(|bytes: &[u8]| {
    let mut greeted = Reader::default();
    greeted.push(bytes);
    let _ = greeted.greeting();
    let mut reader = Reader::default();
    reader.push(bytes);
    while let Ok(Some(item)) = reader.item() {
        if let Item::Command(body) = item {
            let _ = command(&body);
        }
    }
});
