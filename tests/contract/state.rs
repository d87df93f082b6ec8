//! What applies leave behind, as `MatchExternalKv` shows it.

use std::slice;

use crate::served::*;

/// After `batches`, what is held of blocks 1 to 4 reads as `expected`.
async fn check(what: &str, batches: &[Apply], expected: &str) {
    let mut served = Served::with(batches).await;
    let held = served.held(&[1, 2, 3, 4], false).await;
    assert_eq!(text(&held), expected, "{what}");
    // Batches that end with the state they name may be applied again.
    if let Some(last) = batches.last() {
        served.apply(last).await;
        assert_eq!(served.held(&[1, 2, 3, 4], false).await, held, "{what}, the last batch again");
    }
}

/// The same of one worker's actions, each in a batch of its own and then all in one.
async fn check_actions(what: &str, actions: &[Action], expected: &str) {
    let single: Vec<Apply> = actions.iter().map(|action| batch("w", slice::from_ref(action))).collect();
    check(what, &single, expected).await;
    let mut served = Served::with(&[batch("w", actions)]).await;
    assert_eq!(text(&served.held(&[1, 2, 3, 4], false).await), expected, "{what}, in one batch");
}

#[tokio::test]
async fn reports_replace_masks() {
    let first = report(HBM, &[1, 2], &[7, 7], &[]);
    let rows = [
        (vec![first.clone()], "w@http://w HBM[1/7/0 2/7/0]"),
        (vec![report(HBM, &[1], &[], &[])], "w@http://w HBM[1/0/0]"),
        (vec![first.clone(), report(HBM, &[2], &[1], &[])], "w@http://w HBM[1/7/0 2/1/0]"),
        (vec![first.clone(), report(HBM, &[2], &[], &[])], "w@http://w HBM[1/7/0 2/0/0]"),
        (vec![first.clone(), report(HBM, &[1, 2], &[0, 0], &[])], "w@http://w HBM[1/0/0 2/0/0]"),
        (vec![first.clone(), report(DRAM, &[2], &[1], &[])], "w@http://w HBM[1/7/0 2/7/0] DRAM[2/1/0]"),
        (
            vec![report(SSD, &[1], &[4], &[]), first.clone(), report(DRAM, &[1], &[], &[])],
            "w@http://w HBM[1/7/0 2/7/0] DRAM[1/0/0] SSD[1/4/0]",
        ),
        (
            vec![report(HBM, &[1, 2, 3], &[8, 0x8000_0000, u32::MAX], &[])],
            "w@http://w HBM[1/8/0 2/2147483648/0 3/4294967295/0]",
        ),
    ];
    for (actions, expected) in rows {
        check_actions("masks", &actions, expected).await;
    }
}

#[tokio::test]
async fn repeats_in_a_report_act_one_by_one() {
    let rows = [
        (report(HBM, &[1, 1], &[7, 1], &[]), "w@http://w HBM[1/1/0]"),
        (report(HBM, &[1, 2, 1], &[1, 2, 4], &[16, 16, 32]), "w@http://w HBM[1/4/32 2/2/16]"),
        (report(HBM, &[1, 1], &[], &[16, 0]), "w@http://w HBM[1/0/16]"),
        (report(HBM, &[1, 1], &[], &[0, 16]), "w@http://w HBM[1/0/16]"),
        (report(HBM, &[1, 2, 1, 2, 1], &[1, 1, 0, 0, 2], &[]), "w@http://w HBM[1/2/0 2/0/0]"),
    ];
    for (action, expected) in rows {
        check_actions("repeats", &[action], expected).await;
    }
}

#[tokio::test]
async fn sizes_are_the_blocks_and_zero_erases_none() {
    let sized = |worker: &str, size| batch(worker, &[report(HBM, &[1], &[], &[size])]);
    let unsized_by = |worker: &str| batch(worker, &[report(HBM, &[1], &[], &[])]);
    let rows = [
        (vec![sized("w", 16), sized("w", 0)], "w@http://w HBM[1/0/16]"),
        (vec![sized("w", 16), unsized_by("w")], "w@http://w HBM[1/0/16]"),
        (vec![sized("w", 16), sized("w", 32)], "w@http://w HBM[1/0/32]"),
        (vec![sized("w", 0), sized("w", u32::MAX)], "w@http://w HBM[1/0/4294967295]"),
        (vec![sized("v", 16), unsized_by("w")], "v@http://v HBM[1/0/16], w@http://w HBM[1/0/16]"),
        (vec![unsized_by("v"), sized("w", 16)], "v@http://v HBM[1/0/16], w@http://w HBM[1/0/16]"),
        // One holder gone, the other keeps what the first said.
        (vec![sized("v", 16), unsized_by("w"), batch("v", &[revoke(HBM, &[1])])], "w@http://w HBM[1/0/16]"),
        // All gone: nothing is remembered.
        (vec![sized("w", 16), batch("w", &[clear(HBM)]), unsized_by("w")], "w@http://w HBM[1/0/0]"),
        (vec![sized("w", 16), batch("w", &[revoke(HBM, &[1])]), unsized_by("w")], "w@http://w HBM[1/0/0]"),
        // Neither within one batch.
        (
            vec![sized("w", 16), batch("w", &[revoke(HBM, &[1]), report(HBM, &[1], &[], &[])])],
            "w@http://w HBM[1/0/0]",
        ),
    ];
    for (batches, expected) in rows {
        check("sizes", &batches, expected).await;
    }
}

#[tokio::test]
async fn revokes_and_clears_take_what_they_name() {
    let all = || report(HBM, &[1, 2, 3], &[], &[]);
    let spare = || report(DRAM, &[2, 3], &[], &[]);
    let rows = [
        ("one block", vec![all(), revoke(HBM, &[2])], "w@http://w HBM[1/0/0 3/0/0]"),
        (
            "at its tier only",
            vec![all(), spare(), revoke(HBM, &[2, 3])],
            "w@http://w HBM[1/0/0] DRAM[2/0/0 3/0/0]",
        ),
        (
            "unknown ones",
            vec![all(), revoke(HBM, &[9, 4]), revoke(SSD, &[1])],
            "w@http://w HBM[1/0/0 2/0/0 3/0/0]",
        ),
        ("of nothing known", vec![revoke(HBM, &[1])], ""),
        ("twice", vec![all(), revoke(HBM, &[3, 3]), revoke(HBM, &[3])], "w@http://w HBM[1/0/0 2/0/0]"),
        ("everything", vec![all(), revoke(HBM, &[3, 2, 1])], ""),
        ("a clear", vec![all(), spare(), clear(HBM)], "w@http://w DRAM[2/0/0 3/0/0]"),
        ("a clear of nothing", vec![all(), clear(SSD)], "w@http://w HBM[1/0/0 2/0/0 3/0/0]"),
        ("a clear and again", vec![all(), clear(HBM), report(HBM, &[2], &[1], &[])], "w@http://w HBM[2/1/0]"),
        (
            "a clear with hashes",
            vec![all(), spare(), Action { hashes: vec![2, 9], ..clear(DRAM) }],
            "w@http://w HBM[1/0/0 2/0/0 3/0/0]",
        ),
    ];
    for (what, actions, expected) in rows {
        check_actions(what, &actions, expected).await;
    }
    let other = batch("v", &[report(HBM, &[1], &[], &[])]);
    let clear_of_one = [batch("w", &[all()]), other, batch("w", &[clear(HBM)])];
    check("a clear is of one worker", &clear_of_one, "v@http://v HBM[1/0/0]").await;
}

#[tokio::test]
async fn seq_means_nothing() {
    let numbered = |seq, action| Apply { seq, ..batch("w", &[action]) };
    let batches = [
        numbered(u64::MAX, report(HBM, &[1], &[], &[])),
        numbered(0, report(HBM, &[2], &[], &[])),
        numbered(0, revoke(HBM, &[1])),
    ];
    check("seq", &batches, "w@http://w HBM[2/0/0]").await;
}

#[tokio::test]
async fn address_and_spec_are_replaced_by_every_batch() {
    let masked = || batch("w", &[report(HBM, &[1, 2], &[FULL; 2], &[])]);
    let plain = || batch("w", &[report(HBM, &[1, 2], &[], &[])]);
    let at = |address: &str, batch: Apply| Apply { worker_address: address.to_owned(), ..batch };
    let full = |batch: Apply| Apply { cache_spec: spec(FULL, 0), ..batch };
    let empty = || batch("w", &[]);
    let rows = [
        ("as reported", vec![full(masked())], "http://w", 2),
        ("spec absent", vec![full(masked()), empty()], "http://w", 0),
        ("spec back", vec![masked(), full(empty())], "http://w", 2),
        ("spec first", vec![full(empty()), plain()], "http://w", 2),
        ("spec over plain blocks", vec![plain(), full(empty())], "http://w", 0),
        ("moved", vec![plain(), at("http://x", empty())], "http://x", 2),
        ("unroutable", vec![plain(), at("", empty())], "", 0),
        ("routable again", vec![at("", plain()), empty()], "http://w", 2),
        ("byte for byte", vec![at(" HTTP://Ä/ ", plain())], " HTTP://Ä/ ", 2),
    ];
    for (what, batches, address, blocks) in rows {
        let mut served = Served::with(&batches).await;
        let held = served.held(&[1], false).await;
        assert_eq!(held[0].address, address, "{what}");
        let answer = served.prefix(&[1, 2], 0).await;
        let found: Vec<_> = answer
            .matches
            .iter()
            .map(|row| (row.worker_id.as_str(), row.worker_address.as_str(), row.matched_prefix_blocks))
            .collect();
        let expected = if blocks == 0 { Vec::new() } else { vec![("w", address, blocks)] };
        assert_eq!(found, expected, "{what}");
        assert_eq!(answer.best_prefix_blocks, blocks, "{what}");
    }
}

#[tokio::test]
async fn an_empty_batch_is_legal() {
    check("a worker of nothing is not listed", &[batch("w", &[])], "").await;
}
