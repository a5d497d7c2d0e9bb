//! Known mistakes. Each must be noticed within the seeds that a usual run plays, by an invariant that is about it.

use std::time::Instant;

use crate::check::{Invariant, check};
use crate::mutant::Mutant;
use crate::report::{report, whole};
use crate::seeds::{USUAL, asked_for};
use crate::world::{accepts, run};

/// Plays seeds until one shows the mistake.
fn caught(mutant: Mutant, test: &str, by: &[Invariant]) {
    let test = format!("mutants::{test}");
    if let Some(seed) = asked_for() {
        let run = run(seed, Some(mutant));
        return println!("{}", whole(&run, &check(&run.setup, &run.history)));
    }
    let began = Instant::now();
    for seed in (0..USUAL).filter(|seed| !mutant.is_of_deliveries() || accepts(*seed)) {
        let run = run(seed, Some(mutant));
        let violations = check(&run.setup, &run.history);
        if let Some(first) = violations.first() {
            println!("{mutant:?} is caught after {:.1?}\n{}", began.elapsed(), report(seed, &test, &run, &violations));
            assert!(by.contains(&first.invariant), "seed {seed}: {first}; it should be one of {by:?}");
            return;
        }
    }
    panic!("{mutant:?} survives {USUAL} seeds");
}

macro_rules! mutants {
    ($($test:ident: $mutant:ident by $($invariant:ident)|+;)*) => {$(
        #[test]
        fn $test() {
            caught(Mutant::$mutant, stringify!($test), &[$(Invariant::$invariant),+]);
        }
    )*};
}

mutants! {
    takeover_without_fencing: TakeoverUnfenced by TakeoverByRule;
    claim_of_a_live_record: ClaimTakesLive by TakeoverByRule;
    expiry_of_in_flight_records: InFlightExpires by TakeoverByRule;
    sweeping_of_in_flight_records: SweeperTakesInFlight by InFlightStays;
    sweeping_before_the_ttl: SweeperIsEarly by CompletedStays;
    reaper_that_changes_the_attempt: ReaperChangesAttempt by InFlightStays;
    reaper_that_works_by_what_it_read_earlier: ReaperUnfenced by CompletedStays;
    release_on_unknown: HoldReleases by ReleaseByRule;
    settle_without_the_attempts_condition: SettleUnfenced by FencedByAttempt | SettledAsEnded;
    answer_before_durable: SettleBeforeDurable by DurableBeforeAnswer;
    run_before_the_claim_is_durable: ClaimBeforeDurable by ClaimBeforeRun;
    renewal_without_the_attempts_condition: RenewUnfenced by FencedByAttempt;
    ttl_counted_from_the_end: TtlFromNow by TimesByRule;
    replay_past_the_ttl: OldClock by ReplayInTime;
    replay_to_another_tenant: ScopeIgnored by AnswerIsOwn | AnswerFitsRecord;
    replay_to_another_request: FingerprintIgnored by MismatchRefused | AnswerFitsRecord;
    replay_with_other_bytes: AnswerSpoilt by AnswerIsOwn | ReplayIdentical;
    leases_that_never_end: LeaseNeverEnds by EveryKeyAnswers;
    a_hidden_second_send: SendsTwice by OneRunPerClaim;
    probe_that_counts_a_404_too_early: ProbesEarly by TakeoverByRule | ReleaseByRule;
    two_replicas_that_probe_at_once: LockOfAll by OneQuestionAtATime;
    resend_after_a_completion: ResendsCompleted by TakeoverByRule;
    cache_believed_for_any_key: CacheOfAnyKey by AnswerIsOwn;
    hint_that_never_ends: HintNeverEnds by AnswerFitsRecord | EveryKeyAnswers;
    cache_that_grants_claims: CacheGrants by ClaimBeforeRun;
    cache_believed_past_the_ttl: CacheOutlivesTtl by ReplayInTime;
    cache_believed_past_a_purge: CacheOutlivesPurge by ReplayInTime | MismatchRefused;
    accepted_before_durable: AcceptBeforeDurable by DurableBeforeAnswer;
    acceptance_in_the_place_of_another: AcceptReplaces by AcceptedOnce;
    acceptance_beside_a_record: AcceptIgnoresRecord by AcceptedOnce;
    take_that_does_not_hold: TakeHoldsNothing by TakenIsHeld;
    take_that_removes: TakeRemoves by DeliveryStays;
    take_out_of_order: OrderIgnored by InOrder;
    take_of_a_paused_route: PauseIgnored by PauseHolds;
    end_of_a_delivery_that_was_released: ReleaseFinishes by DeliveryStays;
    removal_of_what_is_given_up: ParkRemoves by DeliveryStays;
    giving_up_what_could_not_run: WaitGivesUp by GivenUpByRule;
    delivery_that_is_never_due_again: PostponedForEver by EveryDeliveryEnds | EveryKeyAnswers;
    delivery_without_a_claim: DeliveryUnclaimed by ClaimBeforeRun;
    sweeping_of_a_delivery_s_record: SweeperTakesRecordOfDelivery by RecordOutlivesDelivery;
}
