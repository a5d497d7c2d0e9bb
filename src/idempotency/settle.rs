//! What an attempt's ending does to its record.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::grpc::{self, Status};
use super::policy::Policy;

mod by_body;

pub use by_body::{BodyOutcomes, BodyRule, LARGEST_JUDGED, Number, Scalar};

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The upstream gave a complete answer with this status.
    Answered(u16),
    /// The upstream gave a complete answer to a gRPC call, with this status.
    Called(Status),
    /// Provably nothing was sent.
    Unreachable,
    /// The upstream did not answer in time.
    Timeout,
    /// The connection or the answer broke off.
    Broken,
}

/// What `outcomes` can say of an ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutcomeAction {
    /// Keep the answer and replay it.
    Store,
    /// Forget the key: a retry runs again.
    Release,
    /// The outcome is unknown.
    Hold,
}

/// `outcomes`: overrides of the defaults. The most specific entry wins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// By exact status.
    pub status: BTreeMap<u16, OutcomeAction>,
    /// By class: 2 for `2xx` up to 5 for `5xx`.
    pub class: BTreeMap<u16, OutcomeAction>,
    /// By the status of a gRPC call.
    pub grpc: BTreeMap<Status, OutcomeAction>,
    /// `unreachable`; never `Store`.
    pub unreachable: Option<OutcomeAction>,
    /// `timeout`; never `Store`.
    pub timeout: Option<OutcomeAction>,
    /// `broken`; never `Store`.
    pub broken: Option<OutcomeAction>,
}

/// What another gate, which is the upstream, says of a request that it answered itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateSays {
    /// It sent nothing.
    NothingSent,
    /// An earlier request with the key is not over there, or how it ended is unknown.
    NotOver,
}

/// What the upstream says of its answer to the gate.
pub const CONTROL: HeaderName = HeaderName::from_static("idempotency-control");

/// What the upstream said in `Idempotency-Control`, and in `Idempotency-Status` where it is another gate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// `release`
    pub release: bool,
    /// `no-store`
    pub no_store: bool,
    /// `ttl=SECONDS`
    pub ttl: Option<Duration>,
    /// How many directives were invalid and ignored.
    pub invalid: usize,
    /// `Idempotency-Status`: what the answer is, where it is a gate's own.
    pub of_gate: Option<GateSays>,
}

/// What becomes of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It completes with the answer.
    Complete {
        /// How long it answers retries, from its claim.
        ttl: Duration,
        /// Whether the body is kept; else a tombstone is.
        keep_body: bool,
    },
    /// It is forgotten.
    Release,
    /// It turns unknown.
    Hold,
}

/// Decides what an attempt's ending does to its record. `control` counts only where the upstream answered, and what
/// `outcomes_body` says of the answer, `by_body`, only where it answered no gRPC call, which has a status of its own.
///
/// A gate that is the upstream may answer itself: what it did not send ends as where the upstream cannot be reached, and what is
/// not over there as where it broke off. Otherwise its 409 for an attempt in flight would be the answer for good.
#[must_use]
pub fn settle(policy: &Policy, ending: Ending, control: &Control, by_body: Option<OutcomeAction>) -> Verdict {
    let complete = |keep_body| Verdict::Complete { ttl: control.ttl.unwrap_or(policy.ttl), keep_body };
    if let Ending::Answered(_) | Ending::Called(_) = ending {
        if control.release {
            return Verdict::Release;
        }
        if control.no_store {
            return complete(false);
        }
    }
    let by_body = by_body.filter(|_| matches!(ending, Ending::Answered(_)));
    let by_gate = || match control.of_gate.filter(|_| !policy.outcomes.names(ending))? {
        GateSays::NothingSent => Some(policy.outcomes.action(Ending::Unreachable)),
        GateSays::NotOver => Some(policy.outcomes.action(Ending::Broken)),
    };
    match by_body.or_else(by_gate).unwrap_or_else(|| policy.outcomes.action(ending)) {
        OutcomeAction::Store => complete(true),
        OutcomeAction::Release => Verdict::Release,
        OutcomeAction::Hold => Verdict::Hold,
    }
}

/// The same for an attempt after one whose outcome is unknown: what this one did not do, the earlier one may have done. So
/// nothing is released unless the upstream asks for it, and a conflict, by which upstreams that honour keys say that the earlier
/// request is in progress, is no answer to it unless the configuration keeps it.
#[must_use]
pub fn settle_again(policy: &Policy, ending: Ending, control: &Control, by_body: Option<OutcomeAction>) -> Verdict {
    let is_answered = matches!(ending, Ending::Answered(_) | Ending::Called(_));
    let is_settled_by_name = control.no_store || by_body.is_some() || policy.outcomes.names(ending);
    match settle(policy, ending, control, by_body) {
        Verdict::Release if !(control.release && is_answered) => Verdict::Hold,
        Verdict::Complete { .. } if ending.is_conflict() && !is_settled_by_name => Verdict::Hold,
        verdict => verdict,
    }
}

impl Ending {
    /// Whether it is 409, or a status of gRPC that stands for it (`google.rpc.Code`).
    fn is_conflict(self) -> bool {
        matches!(self, Self::Answered(409) | Self::Called(Status::Aborted | Status::AlreadyExists))
    }

    /// How an answer ends a gRPC call, by its HTTP status, its headers and its trailers.
    ///
    /// Its own status stands in the trailers, or else in the headers, where there is nothing but those. Without one, any
    /// HTTP status but 200 is the answer of an intermediary, and is judged by that. A 200 without one broke off.
    #[must_use]
    pub fn of_call<'a, Lines>(status: u16, headers: Lines, trailers: Lines) -> Self
    where
        Lines: IntoIterator<Item = &'a (HeaderName, HeaderValue)>,
    {
        let find = |lines: Lines| {
            let mut values = lines.into_iter().filter(|(name, _)| *name == grpc::STATUS).map(|(_, value)| value);
            let first = values.next()?;
            Some((first, values.any(|other| other != first)))
        };
        let found = find(trailers).or_else(|| find(headers));
        // One client goes by the first of two, and another by the last.
        if found.is_some_and(|(_, is_contradicted)| is_contradicted) {
            return Self::Broken;
        }
        match (found.and_then(|(value, _)| grpc::status(value)), status) {
            (Some(status), _) => Self::Called(status),
            (None, 200) => Self::Broken,
            (None, status) => Self::Answered(status),
        }
    }
}

impl OutcomeAction {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Release => "release",
            Self::Hold => "hold",
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        [Self::Store, Self::Release, Self::Hold]
            .into_iter()
            .find(|action| action.as_str() == text)
            .ok_or_else(|| format!("`{text}` is not an outcome: use `store`, `release` or `hold`"))
    }
}

impl Outcomes {
    /// Whether an entry names this very status.
    fn names(&self, ending: Ending) -> bool {
        match ending {
            Ending::Answered(status) => self.status.contains_key(&status),
            Ending::Called(status) => self.grpc.contains_key(&status),
            Ending::Unreachable | Ending::Timeout | Ending::Broken => false,
        }
    }

    /// Takes an entry of the configuration's `outcomes`.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn insert(&mut self, entry: &str, action: &str) -> Result<(), String> {
        let action = OutcomeAction::parse(action)?;
        let transport = match entry {
            "unreachable" => &mut self.unreachable,
            "timeout" => &mut self.timeout,
            "broken" => &mut self.broken,
            _ => {
                match (entry.strip_prefix("grpc:"), class(entry)) {
                    (Some(call), _) => self.grpc.insert(call_status(entry, call)?, action),
                    (None, Some(class)) => self.class.insert(class, action),
                    (None, None) => self.status.insert(status(entry)?, action),
                };
                return Ok(());
            }
        };
        if action == OutcomeAction::Store {
            return Err(format!("`{entry}` has no answer to store: use `release` or `hold`"));
        }
        *transport = Some(action);
        Ok(())
    }

    /// The rule: the most specific entry decides, and where two are equally specific, the configured one before
    /// the default. So `429` stays released under `"4xx" = "store"`, and is stored under `"429" = "store"`.
    #[must_use]
    pub fn action(&self, ending: Ending) -> OutcomeAction {
        // What did not answer has nothing to store.
        let without_answer = |action: Option<OutcomeAction>, default| match action {
            Some(OutcomeAction::Store) => OutcomeAction::Hold,
            Some(action) => action,
            None => default,
        };
        match ending {
            Ending::Unreachable => without_answer(self.unreachable, OutcomeAction::Release),
            Ending::Timeout => without_answer(self.timeout, OutcomeAction::Hold),
            Ending::Broken => without_answer(self.broken, OutcomeAction::Hold),
            // An entry for an HTTP status says nothing of a call: nearly every call has 200.
            Ending::Called(status) => self.grpc.get(&status).copied().unwrap_or_else(|| status.default_action()),
            Ending::Answered(status) => {
                let class = status / 100;
                let exact = self.status.get(&status).copied().or_else(|| default_of_status(status));
                exact.or_else(|| self.class.get(&class).copied()).unwrap_or_else(|| default_of_class(class))
            }
        }
    }
}

impl GateSays {
    /// By the one `Idempotency-Status`, which is the code of a problem (`docs/reference/problems.md`).
    fn read(headers: &HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all("idempotency-status").iter();
        match (lines.next()?.as_bytes(), lines.next()) {
            (b"upstream-unreachable" | b"overloaded" | b"quota-exceeded", None) => Some(Self::NothingSent),
            (b"in-flight" | b"outcome-unknown", None) => Some(Self::NotOver),
            _ => None,
        }
    }
}

impl Control {
    /// Reads every `Idempotency-Control` line of an answer: directives with commas between them, in any case.
    ///
    /// A ttl beyond 2^31 seconds is 2^31 seconds, as RFC 9111, section 1.2.2 has it. Two different ones are both
    /// invalid.
    #[must_use]
    pub fn read(headers: &HeaderMap) -> Self {
        Self::of_call(headers, &HeaderMap::new())
    }

    /// The same of a gRPC call: a server that has begun its answer can say it only in the trailers.
    #[must_use]
    pub fn of_call(headers: &HeaderMap, trailers: &HeaderMap) -> Self {
        let mut control = Self { of_gate: GateSays::read(headers), ..Self::default() };
        let mut ttls = Vec::new();
        let lines = [headers, trailers].into_iter().flat_map(|part| part.get_all(&CONTROL));
        for directive in lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b',')) {
            let directive = directive.trim_ascii().to_ascii_lowercase();
            match directive.as_slice() {
                b"" => {}
                b"release" => control.release = true,
                b"no-store" => control.no_store = true,
                other => match other.strip_prefix(b"ttl=").and_then(seconds) {
                    Some(ttl) => ttls.push(ttl),
                    None => control.invalid += 1,
                },
            }
        }
        if ttls.windows(2).all(|pair| pair[0] == pair[1]) {
            control.ttl = ttls.pop();
        } else {
            control.invalid += ttls.len();
        }
        control
    }
}

/// The statuses that a class's default does not suit.
fn default_of_status(status: u16) -> Option<OutcomeAction> {
    match status {
        // The request was refused before it had an effect, and may succeed later.
        401 | 407 | 408 | 425 | 429 => Some(OutcomeAction::Release),
        // A gateway behind us cannot tell either.
        502 | 504 => Some(OutcomeAction::Hold),
        _ => None,
    }
}

fn default_of_class(class: u16) -> OutcomeAction {
    match class {
        2..=4 => OutcomeAction::Store,
        5 => OutcomeAction::Release,
        // Not a final answer of HTTP.
        _ => OutcomeAction::Hold,
    }
}

/// Reads `2xx` to `5xx`.
fn class(entry: &str) -> Option<u16> {
    match entry {
        "2xx" => Some(2),
        "3xx" => Some(3),
        "4xx" => Some(4),
        "5xx" => Some(5),
        _ => None,
    }
}

fn status(entry: &str) -> Result<u16, String> {
    match entry.parse() {
        Ok(status @ 200..=599) if entry.len() == 3 => Ok(status),
        _ => Err(format!(
            "`{entry}` is not an ending: use a status from `200` to `599`, a class from `2xx` to `5xx`, \
             `unreachable`, `timeout` or `broken`, or a status of gRPC such as `grpc:UNAVAILABLE`"
        )),
    }
}

/// Reads the status of gRPC that `entry` names behind `grpc:`.
fn call_status(entry: &str, status: &str) -> Result<Status, String> {
    Status::parse(status).ok_or_else(|| {
        format!(
            "`{entry}` is not a status of gRPC: use a number from `grpc:0` to `grpc:16`, or a name such as \
             `grpc:UNAVAILABLE`"
        )
    })
}

/// Reads a positive number of seconds.
fn seconds(digits: &[u8]) -> Option<Duration> {
    const MOST: u64 = 1 << 31;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = std::str::from_utf8(digits).ok()?.parse().unwrap_or(MOST);
    (number > 0).then(|| Duration::from_secs(number.min(MOST)))
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn read(lines: &[&'static str]) -> Control {
        Control::read(&lines.iter().map(|line| (CONTROL, HeaderValue::from_static(line))).collect())
    }

    /// What a gate says that is the upstream is no answer to keep, unless the configuration names the status.
    #[test]
    fn another_gates_own_answers_are_not_kept() {
        let says = |words: &[&'static str]| {
            let name = HeaderName::from_static("idempotency-status");
            Control::read(&words.iter().map(|word| (name.clone(), HeaderValue::from_static(word))).collect())
        };
        let policy = |entries: &[(&str, &str)]| {
            let mut outcomes = Outcomes::default();
            entries.iter().for_each(|(entry, action)| outcomes.insert(entry, action).unwrap());
            Policy { outcomes, ..Policy::default() }
        };
        let (usual, holds) = (policy(&[]), policy(&[("5xx", "hold")]));
        for (status, word, verdict, again) in [
            (409, "in-flight", Verdict::Hold, Verdict::Hold),
            (409, "outcome-unknown", Verdict::Hold, Verdict::Hold),
            (503, "overloaded", Verdict::Release, Verdict::Hold),
            (502, "upstream-unreachable", Verdict::Release, Verdict::Hold),
            (429, "quota-exceeded", Verdict::Release, Verdict::Hold),
        ] {
            let (ending, control) = (Ending::Answered(status), says(&[word]));
            for policy in [&usual, &holds] {
                assert_eq!(settle(policy, ending, &control, None), verdict, "{word}");
                assert_eq!(settle_again(policy, ending, &control, None), again, "{word}");
            }
        }
        let in_flight = says(&["in-flight"]);
        let named = settle(&policy(&[("409", "store")]), Ending::Answered(409), &in_flight, None);
        assert!(matches!(named, Verdict::Complete { .. }));
        let by_body = settle(&usual, Ending::Answered(409), &in_flight, Some(OutcomeAction::Release));
        assert_eq!(by_body, Verdict::Release);
        // What it stored, or an application answered, is an answer as any.
        for words in [&["executed"][..], &["replayed"], &["response-not-stored"], &["in-flight", "in-flight"], &[]] {
            assert_eq!(says(words), Control::default(), "{words:?}");
        }
    }

    fn seconds(seconds: u64) -> Control {
        Control { ttl: Some(Duration::from_secs(seconds)), ..Control::default() }
    }

    #[test]
    fn directives_are_read() {
        let no_store = Control { no_store: true, ..Control::default() };
        let release = Control { release: true, ..Control::default() };
        for (lines, control) in [
            (&[][..], Control::default()),
            (&[""], Control::default()),
            (&["no-store"], no_store.clone()),
            (&["No-Store"], no_store.clone()),
            (&["release"], release.clone()),
            (&["ttl=60"], seconds(60)),
            (&["TTL=060"], seconds(60)),
            (&["ttl=60, ttl=60"], seconds(60)),
            (&["ttl=99999999999999999999999"], seconds(1 << 31)),
            (&["ttl=2147483649"], seconds(1 << 31)),
            (&["no-store ,, ttl=5", "\trelease"], Control { no_store: true, release: true, ..seconds(5) }),
        ] {
            assert_eq!(read(lines), control, "{lines:?}");
        }
    }

    #[test]
    fn what_is_invalid_is_ignored_and_counted() {
        for (lines, control) in [
            (&["ttl=0"][..], Control { invalid: 1, ..Control::default() }),
            (&["ttl=00, ttl=7"], Control { invalid: 1, ..seconds(7) }),
            (&["ttl=5, ttl=6", "ttl=5"], Control { invalid: 3, ..Control::default() }),
            (&["no-store, keep"], Control { no_store: true, invalid: 1, ..Control::default() }),
        ] {
            assert_eq!(read(lines), control, "{lines:?}");
        }
        for line in [
            "ttl",
            "ttl=",
            "ttl=-1",
            "ttl=+1",
            "ttl=1.5",
            "ttl=1s",
            "ttl=\"5\"",
            "ttl= 5",
            "ttl =5",
            "release=1",
            "no-store;x",
            "nostore",
            "release no-store",
        ] {
            assert_eq!(read(&[line]), Control { invalid: 1, ..Control::default() }, "{line}");
        }
        let part = |lines: &[&'static str]| -> HeaderMap {
            lines.iter().map(|line| (CONTROL, HeaderValue::from_static(line))).collect()
        };
        let trailing =
            |head: &[&'static str], trailers: &[&'static str]| Control::of_call(&part(head), &part(trailers));
        let both = Control { release: true, no_store: true, invalid: 1, ..Control::default() };
        assert_eq!(trailing(&["no-store"], &["release, x"]), both);
        for (head, trailers) in [(&["ttl=5"][..], &[][..]), (&[], &["ttl=5"]), (&["ttl=5"], &["ttl=5"])] {
            assert_eq!(trailing(head, trailers), seconds(5));
        }
        assert_eq!(trailing(&["ttl=5"], &["ttl=6"]), Control { invalid: 2, ..Control::default() });
        assert_eq!(trailing(&["ttl=5, ttl=6"], &["ttl=7"]), Control { invalid: 3, ..Control::default() });
        let odd = HeaderMap::from_iter([(CONTROL, HeaderValue::from_bytes(b"\xff, release").unwrap())]);
        assert_eq!(Control::read(&odd), Control { release: true, invalid: 1, ..Control::default() });
    }

    #[test]
    fn entries_are_read() {
        let mut outcomes = Outcomes::default();
        for (entry, action) in
            [("429", "store"), ("5xx", "hold"), ("unreachable", "hold"), ("timeout", "release"), ("broken", "release")]
        {
            assert_eq!(outcomes.insert(entry, action), Ok(()));
        }
        for (entry, action) in [("grpc:14", "hold"), ("grpc:OK", "release"), ("grpc:UNAVAILABLE", "store")] {
            assert_eq!(outcomes.insert(entry, action), Ok(()));
        }
        let expected = Outcomes {
            status: BTreeMap::from([(429, OutcomeAction::Store)]),
            class: BTreeMap::from([(5, OutcomeAction::Hold)]),
            grpc: BTreeMap::from([(Status::Unavailable, OutcomeAction::Store), (Status::Ok, OutcomeAction::Release)]),
            unreachable: Some(OutcomeAction::Hold),
            timeout: Some(OutcomeAction::Release),
            broken: Some(OutcomeAction::Release),
        };
        assert_eq!(outcomes, expected);
    }

    #[test]
    fn entries_that_make_no_sense_are_told() {
        for (entry, action, said) in [
            ("429", "keep", "`keep`"),
            ("429", "Store", "`Store`"),
            ("199", "store", "`199`"),
            ("100", "hold", "`100`"),
            ("600", "store", "`600`"),
            ("1xx", "store", "`1xx`"),
            ("6xx", "store", "`6xx`"),
            ("4XX", "store", "`4XX`"),
            ("+29", "store", "`+29`"),
            ("0429", "store", "`0429`"),
            ("", "store", "``"),
            ("grpc:17", "release", "`grpc:17`"),
            ("grpc:unavailable", "release", "`grpc:unavailable`"),
            ("grpc:", "release", "`grpc:`"),
            ("unreachable", "store", "no answer"),
            ("timeout", "store", "no answer"),
            ("broken", "store", "no answer"),
        ] {
            let mut outcomes = Outcomes::default();
            let error = outcomes.insert(entry, action).unwrap_err();
            assert!(error.contains(said), "{error}");
            assert_eq!(outcomes, Outcomes::default());
        }
    }

    #[test]
    fn a_call_is_judged_by_its_own_status() {
        let line = |value: &'static str| vec![(grpc::STATUS, HeaderValue::from_static(value))];
        for (status, headers, trailers, expected) in [
            (200, vec![], line("0"), Ending::Called(Status::Ok)),
            (200, line("0"), line("14"), Ending::Called(Status::Unavailable)),
            (200, line("5"), vec![], Ending::Called(Status::NotFound)),
            (503, line("13"), vec![], Ending::Called(Status::Internal)),
            (503, vec![], vec![], Ending::Answered(503)),
            (200, vec![], vec![], Ending::Broken),
            (200, vec![], line("x"), Ending::Broken),
            (200, vec![], [line("12"), line("0")].concat(), Ending::Broken),
            (503, [line("12"), line("0")].concat(), vec![], Ending::Broken),
            (200, vec![], [line("5"), line("5")].concat(), Ending::Called(Status::NotFound)),
        ] {
            assert_eq!(Ending::of_call(status, &headers, &trailers), expected);
        }
        let mut outcomes = Outcomes::default();
        outcomes.insert("2xx", "hold").unwrap();
        assert_eq!(outcomes.action(Ending::Called(Status::Ok)), OutcomeAction::Store);
        let release = Control { release: true, ..Control::default() };
        assert_eq!(settle(&Policy::default(), Ending::Called(Status::Internal), &release, None), Verdict::Release);
    }

    #[test]
    fn a_body_beats_outcomes_and_control_beats_both() {
        let policy = Policy::default();
        let verdict = |ending, control: &Control, by_body| settle(&policy, ending, control, Some(by_body));
        let none = Control::default();
        assert_eq!(verdict(Ending::Answered(200), &none, OutcomeAction::Release), Verdict::Release);
        assert_eq!(verdict(Ending::Answered(200), &none, OutcomeAction::Hold), Verdict::Hold);
        let stored = Verdict::Complete { ttl: policy.ttl, keep_body: true };
        assert_eq!(verdict(Ending::Answered(502), &none, OutcomeAction::Store), stored);
        let no_store = Control { no_store: true, ..Control::default() };
        let tombstone = Verdict::Complete { ttl: policy.ttl, keep_body: false };
        assert_eq!(verdict(Ending::Answered(200), &no_store, OutcomeAction::Release), tombstone);
        let release = Control { release: true, ..Control::default() };
        assert_eq!(verdict(Ending::Answered(200), &release, OutcomeAction::Store), Verdict::Release);
        // What did not answer, or has a status of its own, has no body to be judged by.
        assert_eq!(verdict(Ending::Called(Status::Ok), &none, OutcomeAction::Release), stored);
        assert_eq!(verdict(Ending::Timeout, &none, OutcomeAction::Store), Verdict::Hold);
    }

    #[test]
    fn what_did_not_answer_is_never_stored() {
        let store = Some(OutcomeAction::Store);
        let outcomes = Outcomes { unreachable: store, timeout: store, broken: store, ..Outcomes::default() };
        for ending in [Ending::Unreachable, Ending::Timeout, Ending::Broken] {
            assert_eq!(outcomes.action(ending), OutcomeAction::Hold);
        }
    }
}
