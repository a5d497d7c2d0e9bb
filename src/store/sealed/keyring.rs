//! Sealing: what a store and a cache keep of requests and answers is encrypted and authenticated, under keys that they do not
//! have.
//!
//! ```text
//! version 1 | sealed 1 | name of the key 8 | nonce 12 | AES-256-GCM of the plain form, with its tag of 16
//! ```
//!
//! In plain forms the second byte is 0 (`idempotency/codec.rs`), so the two cannot be confused. It is 1 in sealed ones, and 2 in
//! strict heads: those of routes with `seal = "required"`. What comes before the encrypted bytes is authenticated with them, so
//! a strict head stays one.
//!
//! Three keys are derived from each key of the configuration by HMAC-SHA256: one for the keys of values, one for nonces, and
//! one that is cut to the name. Each value is encrypted under a key of its own: HMAC-SHA256, under the first of these, of the
//! value's place, which is the record's id, the attempt and the part. A value that was put in another place, which may be another
//! record, a later attempt or another part, does not open.
//!
//! **Why no nonce repeats.** A nonce matters only among values under one such key, which are the values of one place: one head or a
//! few endings of an attempt, or what a cache kept of a record over time. The nonce is HMAC-SHA256 of place and plain form,
//! under the second key, cut to 96 bits. Two values of a place get the same nonce only if they and their form are equal, and then their
//! sealed forms are equal too and tell that alone; or by a collision, with a chance of 2^-96 for each pair. A record that a cache kept
//! a million times has half a trillion pairs, so the chance is 2^-57. No process has to count or to know of others, and
//! neither a clock nor a generator of random numbers can fail.
//!
//! Equal endings of one attempt are sealed alike, so a store recognises a call of
//! [`Store::settle`](crate::store::Store::settle) that is repeated. It does not if another key has become the first in between. The
//! caller then gets the record as its own attempt completed it, and takes that as the outcome.
//!
//! **Plain values.** An upstream writes plain endings in its own transaction, and records from before the keys are plain. So
//! plain values are read, and whoever can write to the store can plant one. Two rules close that where a route asks for it, and
//! neither believes anything that the store says: beside a strict head, only a sealed ending is read; and where any route of a
//! configuration has `seal = "required"`, no plain head is.
//!
//! **What is not claimed.** Times, state and origin are not authenticated: a writer can end a record early, or put an answer of
//! the same record back. A gate with the same keys and without `seal = "required"` may seal what was planted. Lengths can be seen.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;

use crate::idempotency::codec::{SEALED, SEALED_STRICTLY};
use crate::idempotency::record::{AttemptToken, Record, RecordId};
use crate::store::resealing::BEGINNING;
use crate::store::{OriginId, RecordEntry};

/// How many bytes come before the encrypted ones.
const HEAD: usize = SEALED.len() + NAME + NONCE_LEN;

/// How many bytes name a key.
const NAME: usize = BEGINNING - SEALED.len();

/// The length of the tag of AES-GCM.
const TAG: usize = 16;

/// How many bytes a key has.
pub const KEY_LENGTH: usize = 32;

/// What a value is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The head of a record.
    Head,
    /// How an attempt ended: the answer, or why it is unknown.
    Ending,
    /// A record in a cache.
    Cached,
    /// Why an operator did something.
    Reason,
    /// What an accepted request sends, but its body.
    Request,
    /// The body of an accepted request.
    Body,
    /// What became of its delivery.
    Note,
}

/// The keys of a configuration: the first seals, and all of them open. A reload replaces them.
pub struct Keyring {
    keys: ArcSwap<Vec<SealingKey>>,
    /// The origins whose heads are strict.
    strict: ArcSwap<HashSet<OriginId>>,
}

/// One key.
#[derive(Clone)]
pub struct SealingKey {
    /// Its name in the configuration.
    pub id: Arc<str>,
    /// Its name in values: derived from the key, so that another key under the same id is another key.
    name: [u8; NAME],
    values: hmac::Key,
    nonces: hmac::Key,
}

/// How a value is sealed, which its beginning tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sealing {
    /// Not at all.
    Plain,
    /// With the key of this name.
    With([u8; NAME], Strictness),
}

/// What a head says of the ending beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strictness {
    /// It may be plain.
    Lenient,
    /// It must be sealed.
    Strict,
}

impl Sealing {
    pub(super) fn of(value: &[u8]) -> Self {
        let (rest, strictness) = match (value.strip_prefix(&SEALED), value.strip_prefix(&SEALED_STRICTLY)) {
            (Some(rest), _) => (rest, Strictness::Lenient),
            (None, Some(rest)) => (rest, Strictness::Strict),
            (None, None) => return Self::Plain,
        };
        // What is cut has a name that no key has.
        let mut name = [0; NAME];
        let length = rest.len().min(NAME);
        name[..length].copy_from_slice(&rest[..length]);
        Self::With(name, strictness)
    }

    /// Whether both need the same key, or none.
    pub(super) fn is_same_key(self, other: Self) -> bool {
        match (self, other) {
            (Self::Plain, Self::Plain) => true,
            (Self::With(name, _), Self::With(other, _)) => name == other,
            (Self::Plain, Self::With(..)) | (Self::With(..), Self::Plain) => false,
        }
    }

    pub(super) fn strictness(self) -> Strictness {
        match self {
            Self::Plain => Strictness::Lenient,
            Self::With(_, strictness) => strictness,
        }
    }
}

impl Strictness {
    fn begin(self) -> [u8; 2] {
        match self {
            Self::Lenient => SEALED,
            Self::Strict => SEALED_STRICTLY,
        }
    }
}

/// Why a value does not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecryptionError {
    /// The configuration does not have its key.
    NoKey,
    /// It was changed, or moved to another place.
    Altered,
    /// It is not sealed, and a route demands that it is.
    Plain,
}

impl DecryptionError {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::NoKey, Self::Altered, Self::Plain];

    /// The word for it: the label `reason` of `oncegate_decryption_failures_total`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoKey => "no-key",
            Self::Altered => "altered",
            Self::Plain => "plain",
        }
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealingKey({})", self.id)
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.load().iter()).finish()
    }
}

impl SealingKey {
    /// The key of these bytes.
    #[must_use]
    pub fn new(id: Arc<str>, bytes: &[u8; KEY_LENGTH]) -> Self {
        let whole = hmac::Key::new(hmac::HMAC_SHA256, bytes);
        let derived = |purpose: &[u8]| hmac::sign(&whole, purpose);
        let key = |purpose| hmac::Key::new(hmac::HMAC_SHA256, derived(purpose).as_ref());
        let mut name = [0; NAME];
        name.copy_from_slice(&derived(b"oncegate seal name 1").as_ref()[..NAME]);
        Self { id, name, values: key(b"oncegate seal value 1"), nonces: key(b"oncegate seal nonce 1") }
    }

    /// Whether both are the same key, whatever they are called.
    #[must_use]
    pub fn is_same_key(&self, other: &Self) -> bool {
        self.name == other.name
    }

    /// The key of one value.
    fn of_value(&self, place: &[u8; 49]) -> Option<LessSafeKey> {
        let key = hmac::sign(&self.values, place);
        UnboundKey::new(&AES_256_GCM, key.as_ref()).ok().map(LessSafeKey::new)
    }

    fn nonce(&self, place: &[u8; 49], strictness: Strictness, plain: &[u8]) -> [u8; NONCE_LEN] {
        let mut whole = hmac::Context::with_key(&self.nonces);
        whole.update(place);
        // A head is sealed again in the other form where the route's `seal` changes before a claim is repeated.
        whole.update(&strictness.begin());
        whole.update(plain);
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&whole.sign().as_ref()[..NONCE_LEN]);
        nonce
    }
}

impl Keyring {
    /// These keys, the first of which seals; without one nothing is sealed.
    #[must_use]
    pub fn new(keys: Vec<SealingKey>) -> Self {
        Self { keys: ArcSwap::from_pointee(keys), strict: ArcSwap::default() }
    }

    /// From now on these count. Returns the ids of those that counted and are not among them.
    pub fn replace(&self, keys: Vec<SealingKey>) -> Vec<Arc<str>> {
        let keys = Arc::new(keys);
        let former = self.keys.swap(Arc::clone(&keys));
        let gone = former.iter().filter(|key| !keys.iter().any(|other| key.is_same_key(other)));
        gone.map(|key| Arc::clone(&key.id)).collect()
    }

    /// The id of each key.
    #[must_use]
    pub fn ids(&self) -> Vec<Arc<str>> {
        self.keys.load().iter().map(|key| Arc::clone(&key.id)).collect()
    }

    /// From now on the heads of these origins are strict, and no plain head is read if there are any.
    pub fn be_strict(&self, origins: HashSet<OriginId>) {
        self.strict.store(Arc::new(origins));
    }

    /// The same keys, with which [`Keyring::be_strict`] was called.
    #[must_use]
    pub fn strict(&self, origins: HashSet<OriginId>) -> Self {
        let keys = Self { keys: ArcSwap::new(self.keys.load_full()), strict: ArcSwap::default() };
        keys.be_strict(origins);
        keys
    }

    /// How the heads of an origin are sealed.
    pub(super) fn strictness(&self, origin: OriginId) -> Strictness {
        if self.strict.load().contains(&origin) { Strictness::Strict } else { Strictness::Lenient }
    }

    /// The name of the first key; `None` without keys.
    pub(super) fn first(&self) -> Option<[u8; NAME]> {
        self.keys.load().first().map(|key| key.name)
    }

    /// The id and the name of each key.
    pub(super) fn names(&self) -> Vec<(Arc<str>, [u8; NAME])> {
        self.keys.load().iter().map(|key| (Arc::clone(&key.id), key.name)).collect()
    }

    /// Whether a value is sealed with a key that is not among these.
    #[must_use]
    pub fn lacks_key_of(&self, value: &[u8]) -> bool {
        match Sealing::of(value) {
            Sealing::Plain => false,
            Sealing::With(name, _) => !self.keys.load().iter().any(|key| key.name == name),
        }
    }

    /// Whether a head is plain that must be sealed, or one of the values that are kept with it.
    pub(super) fn is_planted<'a>(&self, head: &Bytes, others: impl IntoIterator<Item = &'a Bytes>) -> bool {
        match Sealing::of(head) {
            Sealing::Plain => !self.strict.load().is_empty(),
            Sealing::With(_, Strictness::Strict) => {
                others.into_iter().any(|value| Sealing::of(value) == Sealing::Plain)
            }
            Sealing::With(_, Strictness::Lenient) => false,
        }
    }

    /// From now on these open too, until what comes back is dropped.
    #[must_use]
    pub fn open_too(self: &Arc<Self>, keys: &[SealingKey]) -> OpeningToo {
        let former = self.keys.load_full();
        self.replace(former.iter().chain(keys).cloned().collect());
        OpeningToo { ring: Arc::clone(self), former }
    }

    /// The sealed form of a value; the plain one where there is no key.
    #[must_use]
    pub fn seal(&self, id: RecordId, attempt: AttemptToken, part: Part, plain: &Bytes) -> Bytes {
        self.seal_as(Strictness::Lenient, id, attempt, part, plain)
    }

    /// The same of a head that is strict or not.
    pub(super) fn seal_as(
        &self,
        strictness: Strictness,
        id: RecordId,
        attempt: AttemptToken,
        part: Part,
        plain: &Bytes,
    ) -> Bytes {
        let keys = self.keys.load();
        let Some(key) = keys.first() else { return plain.clone() };
        let place = place(id, attempt, part);
        let nonce = key.nonce(&place, strictness, plain);
        let mut sealed = Vec::with_capacity(HEAD + plain.len() + TAG);
        sealed.extend_from_slice(&strictness.begin());
        sealed.extend_from_slice(&key.name);
        sealed.extend_from_slice(&nonce);
        sealed.extend_from_slice(plain);
        let tag = key.of_value(&place).and_then(|key| {
            let (head, text) = sealed.split_at_mut(HEAD);
            key.seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::from(&*head), text).ok()
        });
        // AES-GCM takes 64 GiB, and a key of 32 bytes always.
        sealed.extend_from_slice(tag.expect("no value is larger than AES-GCM takes").as_ref());
        sealed.into()
    }

    /// The plain form of a value. A value that was not sealed is plain already.
    ///
    /// # Errors
    /// Why it does not open.
    pub fn open(
        &self,
        id: RecordId,
        attempt: AttemptToken,
        part: Part,
        value: &Bytes,
    ) -> Result<Bytes, DecryptionError> {
        let Sealing::With(name, _) = Sealing::of(value) else { return Ok(value.clone()) };
        if value.len() < HEAD + TAG {
            return Err(DecryptionError::Altered);
        }
        let (head, text) = value.split_at(HEAD);
        let keys = self.keys.load();
        let key = keys.iter().find(|key| key.name == name).ok_or(DecryptionError::NoKey)?;
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&head[HEAD - NONCE_LEN..]);
        let mut plain = text.to_vec();
        let opened = key.of_value(&place(id, attempt, part)).and_then(|key| {
            let nonce = Nonce::assume_unique_for_key(nonce);
            key.open_in_place(nonce, Aad::from(head), &mut plain).ok().map(|plain| plain.len())
        });
        let length = opened.ok_or(DecryptionError::Altered)?;
        plain.truncate(length);
        Ok(plain.into())
    }
}

impl Keyring {
    /// A record in plain form. What does not open stays as it is, and `report` gets the reason. What must be sealed and is not
    /// becomes what nothing decodes.
    #[must_use]
    pub fn open_record(&self, id: RecordId, record: Record, report: impl Fn(DecryptionError)) -> Record {
        if self.is_planted(&record.head, record.answer.as_ref()) {
            report(DecryptionError::Plain);
            let closed = Bytes::from_static(&SEALED);
            return Record { head: closed.clone(), answer: record.answer.map(|_| closed), ..record };
        }
        let open = |part, value: &Bytes| {
            self.open(id, record.attempt, part, value).unwrap_or_else(|closed| {
                report(closed);
                value.clone()
            })
        };
        let (head, answer) =
            (open(Part::Head, &record.head), record.answer.as_ref().map(|answer| open(Part::Ending, answer)));
        Record { head, answer, ..record }
    }

    /// The same of a record with where it comes from.
    #[must_use]
    pub fn open_listed(&self, listed: RecordEntry, report: impl Fn(DecryptionError)) -> RecordEntry {
        RecordEntry { record: self.open_record(listed.id, listed.record, report), ..listed }
    }
}

/// Keys that open besides those of a ring.
pub struct OpeningToo {
    ring: Arc<Keyring>,
    former: Arc<Vec<SealingKey>>,
}

impl Drop for OpeningToo {
    fn drop(&mut self) {
        self.ring.keys.store(Arc::clone(&self.former));
    }
}

/// Where a value belongs.
fn place(id: RecordId, attempt: AttemptToken, part: Part) -> [u8; 49] {
    let mut place = [0; 49];
    place[..32].copy_from_slice(&id.0);
    place[32..48].copy_from_slice(&attempt.0);
    place[48] = match part {
        Part::Head => 0,
        Part::Ending => 1,
        Part::Cached => 2,
        Part::Reason => 3,
        Part::Request => 4,
        Part::Body => 5,
        Part::Note => 6,
    };
    place
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> SealingKey {
        SealingKey::new(format!("key {byte}").into(), &[byte; KEY_LENGTH])
    }

    fn ring(bytes: &[u8]) -> Keyring {
        Keyring::new(bytes.iter().copied().map(key).collect())
    }

    const ID: RecordId = RecordId([1; 32]);
    const ATTEMPT: AttemptToken = AttemptToken([2; 16]);

    proptest! {
        #[test]
        fn what_is_sealed_opens_in_its_place_alone(plain: Vec<u8>, other in any::<[u8; 32]>(), bit in any::<prop::sample::Index>()) {
            let plain = Bytes::from(plain);
            let keys = ring(&[1]);
            let sealed = keys.seal(ID, ATTEMPT, Part::Head, &plain);
            prop_assert_eq!(keys.open(ID, ATTEMPT, Part::Head, &sealed), Ok(plain.clone()));
            prop_assert_eq!(keys.open(RecordId(other), ATTEMPT, Part::Head, &sealed), Err(DecryptionError::Altered));
            prop_assert_eq!(keys.open(ID, AttemptToken([3; 16]), Part::Head, &sealed), Err(DecryptionError::Altered));
            prop_assert_eq!(keys.open(ID, ATTEMPT, Part::Ending, &sealed), Err(DecryptionError::Altered));
            // Any bit behind the two that say that it is sealed.
            let bit = 16 + bit.index((sealed.len() - 2) * 8);
            let mut altered = sealed.to_vec();
            altered[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 8 * (2 + NAME) { DecryptionError::NoKey } else { DecryptionError::Altered };
            prop_assert_eq!(keys.open(ID, ATTEMPT, Part::Head, &altered.into()), Err(expected));
            let cut = sealed.slice(..sealed.len() - 1);
            prop_assert_eq!(keys.open(ID, ATTEMPT, Part::Head, &cut), Err(DecryptionError::Altered));
        }
    }

    #[test]
    fn the_first_key_seals_and_all_open() {
        let plain = Bytes::from_static(b"\x01\0an answer of some length");
        let old = ring(&[1]).seal(ID, ATTEMPT, Part::Ending, &plain);
        let both = ring(&[2, 1]);
        assert_eq!(both.open(ID, ATTEMPT, Part::Ending, &old), Ok(plain.clone()));
        let new = both.seal(ID, ATTEMPT, Part::Ending, &plain);
        assert_eq!(ring(&[1]).open(ID, ATTEMPT, Part::Ending, &new), Err(DecryptionError::NoKey));
        assert_eq!(ring(&[2]).open(ID, ATTEMPT, Part::Ending, &new), Ok(plain.clone()));
        both.replace(vec![key(3)]);
        assert_eq!(both.open(ID, ATTEMPT, Part::Ending, &old), Err(DecryptionError::NoKey));
        let both = Arc::new(both);
        let too = both.open_too(&[key(1)]);
        assert_eq!(both.open(ID, ATTEMPT, Part::Ending, &old), Ok(plain.clone()));
        assert_eq!(both.seal(ID, ATTEMPT, Part::Ending, &plain)[2..10], key(3).name, "what opens too does not seal");
        drop(too);
        assert_eq!(both.open(ID, ATTEMPT, Part::Ending, &old), Err(DecryptionError::NoKey));
        assert!(!new.windows(6).any(|part| part == b"answer"));
    }

    #[test]
    fn equal_values_of_one_place_are_equal_and_others_share_nothing() {
        let keys = ring(&[1]);
        let seal =
            |attempt, text: &'static str| keys.seal(ID, attempt, Part::Ending, &Bytes::from_static(text.as_bytes()));
        assert_eq!(seal(ATTEMPT, "one"), seal(ATTEMPT, "one"), "a repeated settlement is recognised by its bytes");
        assert_ne!(seal(ATTEMPT, "one")[10..22], seal(ATTEMPT, "two")[10..22], "another nonce");
        let [strict, lenient] = [Strictness::Strict, Strictness::Lenient]
            .map(|strictness| keys.seal_as(strictness, ID, ATTEMPT, Part::Head, &Bytes::from_static(b"one")));
        assert_ne!(lenient[10..22], strict[10..22], "two forms of one head are two messages");
        assert_ne!(seal(ATTEMPT, "one")[22..], seal(AttemptToken([9; 16]), "one")[22..]);
    }

    #[test]
    fn what_is_plain_stays_plain() {
        let plain = Bytes::from_static(b"\x01\0plain");
        assert_eq!(ring(&[]).seal(ID, ATTEMPT, Part::Head, &plain), plain);
        assert_eq!(ring(&[1]).open(ID, ATTEMPT, Part::Head, &plain), Ok(plain));
    }

    #[test]
    fn a_key_does_not_show_in_debug() {
        assert_eq!(format!("{:?}", ring(&[1, 2])), "[SealingKey(key 1), SealingKey(key 2)]");
    }
}
