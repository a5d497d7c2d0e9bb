//! Detects paths that an upstream may interpret in another way than the gate.
//!
//! Servers decode a path, resolve dot segments, merge slashes, cut off parameters, trim dots and white space, and
//! ignore case and a trailing slash, each in its own way and order (RFC 3986, 6.2, describes some of this). Some take
//! what follows two slashes for a host, and some do not mind the case of a method. The gate does none of that: it forwards
//! the path and the method that it matches. Where another reading selects another route, and one of the two is protected,
//! the policy is ambiguous, and the request is refused.

use std::fmt;
use std::sync::Arc;

use http::Method;

use self::normalization::{has_stream, normalizations};
use super::pattern::PathVariant;
use super::{Route, Router};

mod normalization;

/// A request whose path or method can be read so that it belongs to another route, and one of the two is protected.
#[derive(Clone, Debug)]
pub struct Ambiguous {
    /// The kind of ambiguity.
    pub kind: Ambiguity,
    /// What of the path has the other reading, where a normalization does.
    pub features: Vec<&'static str>,
    /// The reading; nothing where there are too many.
    pub reading: Option<String>,
    /// The route of the path as it stands.
    pub route: Option<Arc<Route>>,
    /// The route of the reading.
    pub other: Option<Arc<Route>>,
}

/// The kind of ambiguity in a path or a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ambiguity {
    /// Its percent-encoding, dot segments, empty segments, a host between slashes, parameters, backslashes, ends of segments
    /// or letters beyond ASCII.
    Normalization,
    /// The case of its letters.
    Case,
    /// The slash at its end.
    TrailingSlash,
    /// The case of its method's letters, which count (RFC 9110, 9.1), though not to every server.
    Method,
    /// More readings than are checked.
    TooManyReadings,
}

impl fmt::Display for Ambiguous {
    /// For the client: without the names of routes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let normalized;
        let what = match self.kind {
            Ambiguity::Normalization => {
                normalized = format!("by {}", self.features.join(" and "));
                &normalized
            }
            Ambiguity::Case => "letters in upper and lower case may or may not be the same",
            Ambiguity::TrailingSlash => "the slash at the end may or may not count",
            Ambiguity::TooManyReadings => "it has more readings than are looked at",
            Ambiguity::Method => {
                return f.write_str(
                    "the method has lowercase letters, which some servers take for capitals, and different rules hold for that \
                     method here; nothing was sent: write the method in capitals",
                );
            }
        };
        write!(
            f,
            "the path can be read in two ways ({what}), and different rules hold for them here; nothing was sent: write the \
             path plainly"
        )
    }
}

impl Router {
    /// The route of a request, as [`Router::find`] finds it, unless its path or its method can be read otherwise and that matters:
    /// another reading belongs to another route or to none, and one of the two is protected.
    ///
    /// That letters may count in whatever case, and a slash at the end not at all, holds for every path; only a route
    /// that says more of the path than the one it has makes a difference there. `/public` can be exempt under a protected
    /// `/{*rest}`, though `/public/` is not.
    ///
    /// # Errors
    /// The request must be refused.
    pub fn choose(
        &self,
        method: &Method,
        host: Option<&str>,
        path: &str,
    ) -> Result<Option<&Arc<Route>>, Box<Ambiguous>> {
        let host = self.host_that_matters(host);
        let route = self.find_at(method, host, path);
        let check = AmbiguityCheck { router: self, method, host, route };
        check.check_method(path)?;
        if !self.paths_matter || !path.starts_with('/') {
            return Ok(route);
        }
        let bytes = path.as_bytes();
        check.check_folds(bytes, route)?;
        let is_unusual = match route {
            Some(route) => route.path.has_parameter_where(path, is_unusual),
            None => has_unusual(bytes),
        };
        if is_unusual && check.candidates().any(|route| route.protects()) {
            check.check_normalizations(bytes)?;
        }
        Ok(route)
    }
}

/// A check of the other readings of a path.
struct AmbiguityCheck<'a> {
    router: &'a Router,
    method: &'a Method,
    host: Option<&'a str>,
    /// The route of the path as it stands.
    route: Option<&'a Arc<Route>>,
}

impl<'a> AmbiguityCheck<'a> {
    /// Routes that match the request on some path, the most specific first.
    fn candidates(&self) -> impl Iterator<Item = &'a Arc<Route>> {
        let Self { method, host, .. } = *self;
        self.router.ranked().filter(move |route| route.serves(method, host))
    }

    /// Checks the method in capitals, which is not the same method to the gate.
    fn check_method(&self, path: &str) -> Result<(), Box<Ambiguous>> {
        if !self.method.as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Ok(());
        }
        let Ok(capitals) = Method::from_bytes(self.method.as_str().to_ascii_uppercase().as_bytes()) else {
            return Ok(());
        };
        let other = self.router.choose(&capitals, self.host, path)?;
        self.check(Ambiguity::Method, PathVariant::raw(path.as_bytes()), other)
            .map_err(|ambiguous| Box::new(Ambiguous { reading: Some(capitals.to_string()), ..*ambiguous }))
    }

    /// Checks each normalization of the path, with its folds.
    fn check_normalizations(&self, path: &[u8]) -> Result<(), Box<Ambiguous>> {
        let Some(readings) = normalizations(path) else {
            return Err(Box::new(Ambiguous {
                kind: Ambiguity::TooManyReadings,
                features: Vec::new(),
                reading: None,
                route: self.route.cloned(),
                other: None,
            }));
        };
        for (place, reading) in readings.paths() {
            let variant = PathVariant::raw(reading);
            let found = self.candidates().find(|route| route.path.matches_variant(variant));
            let named =
                |ambiguous: Box<Ambiguous>| Box::new(Ambiguous { features: readings.features(place), ..*ambiguous });
            self.check(Ambiguity::Normalization, variant, found).map_err(named)?;
            self.check_folds(reading, found)?;
        }
        Ok(())
    }

    /// Checks a reading, of which `found` is the route, with the trailing slash toggled and with any case.
    fn check_folds(&self, reading: &[u8], found: Option<&Arc<Route>>) -> Result<(), Box<Ambiguous>> {
        let as_is = PathVariant::raw(reading);
        let slash = match reading.strip_suffix(b"/") {
            Some(b"") => None,
            Some(path) => Some(PathVariant { path, ..as_is }),
            None => Some(PathVariant { slash: true, ..as_is }),
        };
        let case_counts = self.router.has_capitals || reading.iter().any(u8::is_ascii_uppercase);
        let any_case = |variant| PathVariant { any_case: true, ..variant };
        let folds = [
            (Ambiguity::TrailingSlash, slash),
            (Ambiguity::Case, Some(any_case(as_is)).filter(|_| case_counts)),
            (Ambiguity::Case, slash.map(any_case).filter(|_| case_counts)),
        ];
        for (kind, fold) in folds {
            let Some(fold) = fold else { continue };
            // A more specific path ranks before it. A route with a host may rank after it, if the paths differ only in
            // a trailing slash.
            let is_before = |route: &&Arc<Route>| found.is_none_or(|found| !Arc::ptr_eq(found, route));
            let before = self.router.ranked().take_while(|route| self.router.hosts_matter || is_before(route));
            let mut others =
                before.filter(|route| route.path.matches_variant(fold) && route.serves(self.method, self.host));
            let Some(first) = others.next() else { continue };
            // In any case, several may have the same precedence.
            let ties = others.filter(|other| !first.is_more_specific(other));
            for other in std::iter::once(first).chain(ties) {
                if found.is_none_or(|found| other.is_more_specific(found)) {
                    self.check(kind, fold, Some(other))?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a reading that belongs to another route, where that matters.
    fn check(
        &self,
        kind: Ambiguity,
        reading: PathVariant<'_>,
        other: Option<&Arc<Route>>,
    ) -> Result<(), Box<Ambiguous>> {
        let is_same = match (self.route, other) {
            (Some(route), Some(other)) => Arc::ptr_eq(route, other),
            (None, None) => true,
            _ => false,
        };
        if is_same || !self.route.into_iter().chain(other).any(|route| route.protects()) {
            return Ok(());
        }
        let slash = if reading.slash { "/" } else { "" };
        let text = format!("{}{slash}", String::from_utf8_lossy(reading.path));
        let reading = Some(if reading.any_case { text.to_ascii_lowercase() } else { text });
        let (route, other) = (self.route.cloned(), other.cloned());
        Err(Box::new(Ambiguous { kind, features: Vec::new(), reading, route, other }))
    }
}

impl Route {
    /// Whether it says more of a request than `other` does, of its path or else of its host.
    fn is_more_specific(&self, other: &Self) -> bool {
        self.path.is_more_specific(&other.path)
            || !other.path.is_more_specific(&self.path) && self.host.is_some() && other.host.is_none()
    }
}

/// Whether a segment has more than one reading.
fn is_unusual(segment: &[u8], is_last: bool) -> bool {
    segment.is_empty() && !is_last
        || segment.last() == Some(&b'.')
        || has_stream(segment)
        || segment.iter().any(|byte| matches!(byte, b'%' | b';' | b'\\' | b'?' | b'#' | ..=b' ' | 0x7F..))
}

fn has_unusual(path: &[u8]) -> bool {
    let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        if is_unusual(segment, segments.peek().is_none()) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
