//! What there is at the admin listener, and who may use it.

use http::Method;

use super::page::File;
use super::tokens::Role;

/// A path, and what there is.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// `{id}` stands for one segment.
    pub(super) path: &'static str,
    pub(super) resource: Resource,
    pub(super) rights: &'static [Right],
    /// Probes and scrapers may add what they like; a mistyped parameter of the API must not be ignored.
    pub(super) takes_parameters: bool,
}

/// A method, and the role that it needs. Without one it is anybody's, who needs no token.
pub(super) type Right = (Method, Option<Role>);

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Page(File),
    Livez,
    Readyz,
    Metrics,
    OpenApi,
    Routes,
    Stats,
    Observed,
    Records,
    Record,
    Resolve,
    Retry,
    Deliveries,
    Pause,
    Resume,
    PurgeAll,
    ResolveAll,
    RetryAll,
    Reseal,
    Reload,
    Audit,
}

const ANYBODY: &[Right] = &[(Method::GET, None), (Method::HEAD, None)];
const VIEWER: &[Right] = &[(Method::GET, Some(Role::Viewer)), (Method::HEAD, Some(Role::Viewer))];
const OPERATOR: &[Right] = &[(Method::POST, Some(Role::Operator))];

/// Every endpoint with the roles that it needs. Where two paths fit, the first counts.
pub(super) const ENDPOINTS: &[Endpoint] = &[
    file("/", File::Index),
    file("/page/page.css", File::Style),
    file("/page/main.js", File::Main),
    file("/page/api.js", File::Api),
    file("/page/dom.js", File::Dom),
    file("/page/now.js", File::Now),
    file("/page/records.js", File::Records),
    file("/page/record.js", File::Record),
    file("/page/audit.js", File::Audit),
    file("/page/deliveries.js", File::Deliveries),
    file("/page/dialog.js", File::Dialog),
    file("/page/icon.svg", File::Icon),
    Endpoint { path: "/livez", resource: Resource::Livez, rights: ANYBODY, takes_parameters: true },
    Endpoint { path: "/readyz", resource: Resource::Readyz, rights: ANYBODY, takes_parameters: true },
    Endpoint { path: "/metrics", resource: Resource::Metrics, rights: VIEWER, takes_parameters: true },
    Endpoint { path: "/api/v1/openapi.json", resource: Resource::OpenApi, rights: VIEWER, takes_parameters: false },
    Endpoint { path: "/api/v1/routes", resource: Resource::Routes, rights: VIEWER, takes_parameters: false },
    Endpoint { path: "/api/v1/stats", resource: Resource::Stats, rights: VIEWER, takes_parameters: false },
    Endpoint { path: "/api/v1/observed", resource: Resource::Observed, rights: VIEWER, takes_parameters: false },
    Endpoint { path: "/api/v1/records", resource: Resource::Records, rights: VIEWER, takes_parameters: true },
    // A dry run, too: with a list of the same filter, a viewer finds the same records.
    Endpoint { path: "/api/v1/records/purge", resource: Resource::PurgeAll, rights: OPERATOR, takes_parameters: false },
    Endpoint {
        path: "/api/v1/records/resolve",
        resource: Resource::ResolveAll,
        rights: OPERATOR,
        takes_parameters: false,
    },
    Endpoint { path: "/api/v1/records/retry", resource: Resource::RetryAll, rights: OPERATOR, takes_parameters: false },
    Endpoint { path: "/api/v1/records/reseal", resource: Resource::Reseal, rights: OPERATOR, takes_parameters: true },
    Endpoint {
        path: "/api/v1/records/{id}",
        resource: Resource::Record,
        rights: &[
            (Method::GET, Some(Role::Viewer)),
            (Method::HEAD, Some(Role::Viewer)),
            (Method::DELETE, Some(Role::Operator)),
        ],
        takes_parameters: true,
    },
    Endpoint {
        path: "/api/v1/records/{id}/resolve",
        resource: Resource::Resolve,
        rights: OPERATOR,
        takes_parameters: false,
    },
    Endpoint {
        path: "/api/v1/records/{id}/retry",
        resource: Resource::Retry,
        rights: OPERATOR,
        takes_parameters: false,
    },
    Endpoint { path: "/api/v1/deliveries", resource: Resource::Deliveries, rights: VIEWER, takes_parameters: true },
    Endpoint { path: "/api/v1/deliveries/pause", resource: Resource::Pause, rights: OPERATOR, takes_parameters: false },
    Endpoint {
        path: "/api/v1/deliveries/resume",
        resource: Resource::Resume,
        rights: OPERATOR,
        takes_parameters: false,
    },
    // Without reasons for a viewer, who may read keys there.
    Endpoint { path: "/api/v1/audit", resource: Resource::Audit, rights: VIEWER, takes_parameters: true },
    Endpoint { path: "/api/v1/reload", resource: Resource::Reload, rights: OPERATOR, takes_parameters: false },
];

/// A file of the page, which holds no data.
const fn file(path: &'static str, file: File) -> Endpoint {
    Endpoint { path, resource: Resource::Page(file), rights: ANYBODY, takes_parameters: true }
}

/// What a read needs that shows or names a key, or shows an answer.
pub(super) const REVEALING: Role = Role::Operator;

impl Endpoint {
    /// What a path names, and the id in it; an empty one where it has none.
    pub(super) fn at(path: &str) -> Option<(&'static Self, &str)> {
        ENDPOINTS.iter().find_map(|endpoint| Some((endpoint, endpoint.id_in(path)?)))
    }

    fn id_in<'a>(&self, path: &'a str) -> Option<&'a str> {
        match self.path.split_once("{id}") {
            None => (path == self.path).then_some(""),
            Some((before, after)) => {
                let id = path.strip_prefix(before)?.strip_suffix(after)?;
                (!id.is_empty() && !id.contains('/')).then_some(id)
            }
        }
    }

    /// What a method needs; nothing where it cannot be used here.
    pub(super) fn right(&self, method: &Method) -> Option<&'static Right> {
        self.rights.iter().find(|(known, _)| known == method)
    }

    /// Whether it needs neither a host nor a token: probes learn nothing but one word, and the page holds no data.
    pub(super) fn is_anybodys(&self) -> bool {
        self.rights.iter().all(|(_, role)| role.is_none())
    }

    /// The methods that can be used here.
    pub(super) fn allow(&self) -> String {
        self.rights.iter().map(|(method, _)| method.as_str()).collect::<Vec<_>>().join(", ")
    }
}

impl PartialEq for Endpoint {
    fn eq(&self, other: &Self) -> bool {
        self.resource == other.resource
    }
}

impl Eq for Endpoint {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_names_one_thing() {
        let id = "0".repeat(64);
        for endpoint in ENDPOINTS {
            let path = endpoint.path.replace("{id}", &id);
            let (found, found_id) = Endpoint::at(&path).unwrap();
            assert_eq!(found.resource, endpoint.resource, "{path}");
            assert_eq!(found_id, if endpoint.path.contains("{id}") { &*id } else { "" }, "{path}");
        }
        for path in
            ["", "//", "/page/", "/livez/", "/api/v1/records/", "/api/v1/records//resolve", "/api/v1/records/a/b"]
        {
            assert!(Endpoint::at(path).is_none(), "{path}");
        }
    }
}
