"""Maps error messages of Google, its Pulumi provider and the network to this project's error and
the fix.

Pure. The patterns match messages that users of Google and of the provider reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from payload.core.errors import CloudAuthError, CloudError, ConfigError, TileforgeError
from payload.core.suggested_commands import command
from payload.storage.google_environment_login import REFUSED_CREDENTIALS, GoogleLogin

_UP = command("orchestrate", "up")
_EXCEPTION = "Request an exception for this project from the organization's administrators"
_OTHER_WAYS = {
    "compute.disableGuestAttributesAccess": "",
    "compute.requireOsLogin": "use accessMode oslogin: pulumi config set accessMode oslogin",
    "compute.requireShieldedVm": (
        "use an image with the feature UEFI_COMPATIBLE: pulumi config set image NAME"
    ),
    "compute.restrictCloudNATUsage": (
        "do without NAT: pulumi config set egress none (see docs/guides/cluster_options.md)"
    ),
    "compute.trustedImageProjects": (
        "use an image from an allowed project: pulumi config set image NAME"
    ),
    "compute.vmExternalIpAccess": (
        "reach the head through Google's proxy: pulumi config set accessMode iap"
    ),
    "gcp.resourceLocations": (
        "use an allowed region: pulumi config set region REGION, and zones of that region"
    ),
    "gcp.restrictCmekCryptoKeyProjects": (
        "use a key from an allowed project: pulumi config set kmsKey NAME"
    ),
    "gcp.restrictNonCmekServices": "use your own key: pulumi config set kmsKey NAME",
    "iam.allowedPolicyMemberDomains": "do without a bucket: pulumi config set bucket none",
    "iam.disableServiceAccountCreation": "",
}
_ROLES = {
    "compute": "roles/compute.admin",
    "iam": "roles/iam.serviceAccountAdmin",
    "storage": "roles/storage.admin",
    "dns": "roles/dns.admin",
    "file": "roles/file.editor",
    "cloudkms": "roles/cloudkms.admin",
    "iap": "roles/iap.tunnelResourceAccessor",
}
_READERS = {
    "compute": "roles/compute.viewer",
    "iam": "roles/iam.serviceAccountViewer",
    "storage": "roles/storage.bucketViewer",
    "dns": "roles/dns.reader",
    "file": "roles/file.viewer",
    "cloudkms": "roles/cloudkms.viewer",
}
_ACT_AS = "roles/iam.serviceAccountUser"
QUOTA_PROJECT_FIX = (
    "The login has no quota project. Set it: gcloud auth application-default set-quota-project "
    "{project}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A recognized refusal."""

    error: type[TileforgeError]
    advice: str
    """The fix. If Google's message does not state the cause, the text begins with the cause."""


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    error: type[TileforgeError]
    advice: str
    """Template of the fix, with placeholders `{project}` and the pattern's named groups."""


def _rule(pattern: str, error: type[TileforgeError], advice: str) -> _Rule:
    return _Rule(re.compile(pattern), error, advice)


def policy_fix(constraint: str) -> str:
    """Return the fix for a violated organization policy, such as gcp.resourceLocations."""
    other = _OTHER_WAYS.get(constraint, "")
    return f"{_EXCEPTION}, or {other}" if other else _EXCEPTION


def billing_fix(project: str) -> str:
    """Return the fix for a project with disabled billing."""
    return (
        "The project has no open billing account. Link an account: gcloud billing projects link "
        f"{project} --billing-account=ACCOUNT (list your accounts: gcloud billing accounts list)"
    )


def bucket_fix(bucket: str) -> str:
    """Return the fix for missing access to a bucket."""
    return (
        "The bucket belongs to another project, or this login has no access. Its owner must run: "
        f"gcloud storage buckets add-iam-policy-binding gs://{bucket} --member=user:YOU "
        "--role=roles/storage.admin; or use another bucket: pulumi config set bucket NAME"
    )


# Credentials and permissions. If there are several problems, problems of this group come first.
_ACCESS = (
    _rule(
        r"rateLimitExceeded|RATE_LIMIT_EXCEEDED|[Qq]ueries per minute",
        CloudError,
        "Google limits requests per minute. Repeat the command in a minute",
    ),
    _rule(
        r"requires a quota project|end user credentials from the Google Cloud SDK",
        CloudAuthError,
        QUOTA_PROJECT_FIX,
    ),
    _rule(
        r"requires billing to be enabled|has billing disabled|BILLING_DISABLED"
        r"|[Bb]illing account for (?:the owning )?project .{0,60}(?:not found|disabled|is closed)",
        CloudAuthError,
        billing_fix("{project}"),
    ),
    _rule(
        r"vpcServiceControlsUniqueIdentifier|VPC_SERVICE_CONTROLS|SECURITY_POLICY_VIOLATED",
        CloudAuthError,
        "A perimeter of VPC Service Controls blocks requests from this machine; a role does not "
        "change this. Use a network inside the perimeter, or request an ingress rule from the "
        "organization's administrators, with the identifier in this message",
    ),
    _rule(
        r"\bconstraints?/(?:constraints/)?(?P<constraint>[a-z]\w{1,30}\.\w{1,60})",
        CloudAuthError,
        "An organization policy forbids this change. {policy_fix}",
    ),
    _rule(
        r"do not belong to a permitted customer",
        CloudAuthError,
        "The organization policy iam.allowedPolicyMemberDomains forbids this change. "
        + policy_fix("iam.allowedPolicyMemberDomains"),
    ),
    _rule(
        r"[Pp]roject \S{1,64} is not found and cannot be used for API calls"
        r"|The resource 'projects/[^/' ]{1,64}' was not found|[Uu]nknown project id"
        r"|Failed to find project",
        ConfigError,
        "The project was not found, or this login has no access. List your projects: gcloud "
        "projects list; then: pulumi config set project ID",
    ),
    _rule(
        r"has not been used in project|accessNotConfigured|SERVICE_DISABLED",
        CloudAuthError,
        "The API {api} is disabled. Enable it: gcloud services enable {api} --project={project}",
    ),
    _rule(
        r"GOOGLE_APPLICATION_CREDENTIALS environment variable",
        CloudAuthError,
        "GOOGLE_APPLICATION_CREDENTIALS is set to a file that cannot be read. Set the variable to "
        "the right file, or unset it and log in: gcloud auth application-default login",
    ),
    _rule(
        r"(?i)could not find default credentials|No credentials loaded",
        CloudAuthError,
        "There are no Google Cloud credentials. Log in: gcloud auth application-default login",
    ),
    # These rules precede all rules whose fix is a role.
    _rule(REFUSED_CREDENTIALS.pattern, CloudAuthError, "{credentials}"),
    _rule(
        r"does not have access to service account '?(?P<account>[^'\s]{1,256})"
        r"|SERVICE_ACCOUNT_ACCESS_DENIED|(?i:iam\.serviceAccounts\.actAs)",
        CloudAuthError,
        "You cannot start machines that run as this account. The project's owner must run: "
        f"gcloud projects add-iam-policy-binding {{project}} --member=user:YOU --role={_ACT_AS}",
    ),
    _rule(
        r"storage bucket \"(?:b/)?(?P<bucket>[a-z0-9._-]{3,222})\".{0,200}?Error 403"
        r"|does not have storage\.buckets\.\w+ access to (?:the Google Cloud Storage bucket|"
        r"(?P<other>[a-z0-9._-]{3,222}))",
        CloudAuthError,
        bucket_fix("{bucket}"),
    ),
    _rule(
        r"googleapi: Error 403|PERMISSION_DENIED|Permission denied"
        r"|Required '[\w.]{1,99}' permission|[Pp]ermission '[\w.]{1,99}' denied",
        CloudAuthError,
        "{role_advice}",
    ),
)
# All other rules; if there are several problems, the first is reported.
_OTHERS = (
    _rule(
        r"proxyconnect|Proxy Authentication Required|Tunnel connection failed: 407",
        CloudError,
        "The proxy refuses this request. If it needs a login: "
        "export https_proxy=http://USER:PASSWORD@HOST:PORT",
    ),
    _rule(
        r"x509: |CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        CloudError,
        "A proxy or firewall replaces Google's certificate with its own. Set its CA certificate: "
        "export SSL_CERT_FILE=FILE REQUESTS_CA_BUNDLE=FILE",
    ),
    _rule(
        r"[Ff]ingerprint",
        ConfigError,
        "The resource was changed by another user or program at the same time. Repeat the command",
    ),
    _rule(
        r"requested bucket name is not available",
        ConfigError,
        "Bucket names are unique in all of Google Cloud. If the bucket is yours, use it: pulumi "
        "config set bucket NAME; or choose another name",
    ),
    _rule(
        r"Error 409\b|alreadyExists|already exists",
        ConfigError,
        "The resource exists in Google Cloud but not in the stack, for example after a lost "
        f"response. Repeat: {_UP}, which first removes leftovers with this cluster's identity",
    ),
    _rule(
        r"the change requires stopping it",
        ConfigError,
        "The machine was changed outside Pulumi, and only a stopped machine can be changed back. "
        f"Rebuild it: {_UP}",
    ),
    _rule(
        r"already being used by '(?:\S*/)?(?P<kind>[a-zA-Z]{1,40})/(?P<user>[a-z0-9-]{1,64})'",
        ConfigError,
        "The stack did not create {user} ({kind}). Delete this resource with the tool that "
        "created it, then repeat the command. If no command lists the resource, a Google service "
        "(Cloud Run, GKE, a private connection) created it: delete that service's resources in "
        "the network. Google can take hours to release the network, at no cost",
    ),
    _rule(
        r"resourceInUseByAnotherResource|already being used by",
        ConfigError,
        "A resource outside the stack uses this resource. Find the other resource with `gcloud "
        "compute networks describe NAME` or on the network's page in the console. Delete the other "
        "resource, then repeat the command",
    ),
    _rule(
        r"[Dd]eletion [Pp]rotection is enabled|protected against deletion",
        ConfigError,
        "The machine's deletion protection is on. Turn the protection off, then repeat the "
        "command: gcloud compute instances update {machine} --no-deletion-protection "
        "--project={project}",
    ),
    _rule(
        r"because it is protected",
        ConfigError,
        "This is a results bucket of an older release. Remove everything except the bucket: "
        + command("orchestrate", "down"),
    ),
    _rule(
        r"No more than (?P<most>[0-9]{1,6}) instances? of machine type (?P<type>\S{1,64}) can be",
        ConfigError,
        "Google places at most {most} machines of {type} close together. Use fewer nodes: "
        "pulumi config set nodeCount NUMBER; or accept a slower network: "
        "pulumi config set compactPlacement false",
    ),
    _rule(
        r"is not enabled, current state is: (?P<state>[A-Z_]{1,40})",
        ConfigError,
        f"The key in kmsKey is {{state}}. Run {command('orchestrate', 'doctor')} for the command "
        "that enables it, or use another key: pulumi config set kmsKey NAME",
    ),
    _rule(
        r"Cloud KMS region '?(?P<location>[\w-]{1,64})'? not available|kms\S* .{0,120}"
        r"(?:same|different|wrong) (?:location|region)|KMS_RESOURCE_NOT_FOUND_IN_LOCATION",
        ConfigError,
        "The key must be in the cluster's region. Use another key: pulumi config set kmsKey NAME",
    ),
    _rule(
        r"dial tcp|connection re(?:fused|set)|no[ ]such host|i/o timeout|TLS handshake|EOF",
        CloudError,
        "Google Cloud cannot be reached from this machine. Check the network, then repeat the "
        "command",
    ),
    _rule(
        r"Error 5[0-9][0-9]\b|Internal error|backendError",
        CloudError,
        "The failure is on Google's side. Repeat the command",
    ),
    _rule(
        r"Error 404\b.*images/|images/.*(?:not found|notFound)|[Cc]ould not find image"
        r"|referenced image resource cannot be found",
        ConfigError,
        "The image was not found, or this login has no access. List images: gcloud compute images "
        "list; then: pulumi config set image NAME",
    ),
    _rule(
        r"(?i)Error 40[04]\b.*(?:serviceAccount|service account|iam\.gserviceaccount).*"
        r"(?:not found|notFound|does not exist)",
        CloudError,
        "The new service account is not yet known to all of Google Cloud. Repeat the command in a "
        "minute",
    ),
    _rule(
        r"specified bucket does not exist",
        ConfigError,
        "The bucket in the config does not exist. List your buckets: gcloud storage ls; then: "
        "pulumi config set bucket NAME; or have `up` create one: pulumi config set bucket create",
    ),
    _rule(
        r"Error 404\b|notFound|couldn't find resource",
        ConfigError,
        f"The resource does not exist, or was deleted. Repeat: {_UP}. If `up` fails again, "
        "correct the wrong name in the config (show it: pulumi config)",
    ),
    _rule(
        r"Error 400\b",
        ConfigError,
        "Google rejects this combination of settings. Change the setting that Google's message "
        "names: pulumi config set KEY VALUE",
    ),
)
_API = re.compile(r"apis/api/([a-z.]{1,64})/|\b([a-z]{2,40}\.googleapis\.com)\b")
_PROJECT = re.compile(r"projects/([a-z][a-z0-9-]{4,28}[a-z0-9])\b|[?&]project=([\w-]{1,64})")
_PERMISSION = re.compile(
    r"Required '([\w.]{1,99})' permission|[Pp]ermission '([\w.]{1,99})'"
    r"|[Pp]ermission ([a-z]\w{1,30}\.[\w.]{1,99}) is required"
    r"|does not have ([a-z]\w{1,30}\.\w{1,30}\.\w{1,30}) access"
)
_INSTANCE = re.compile(r"instance ([a-z0-9-]{1,63})\b")


def access_refusal(text: str, *, project: str = "", login: GoogleLogin) -> Refusal | None:
    """Return a refusal about credentials, permissions, policies or the project; None for others.

    `text` is a single line. `project` is inserted into commands; if empty, it is parsed from
    `text`. `login` is the login that made the refused request.
    """
    return _first(_ACCESS, text, project=project, credentials=login.refusal(text))


def other_refusal(text: str, *, project: str = "") -> Refusal | None:
    """Return a refusal that `access_refusal` does not cover, or None if the text is not
    recognized."""
    return _first(_OTHERS, text, project=project)


def _first(
    rules: tuple[_Rule, ...], text: str, *, project: str, credentials: str = ""
) -> Refusal | None:
    for rule in rules:
        found = rule.pattern.search(text)
        if found is not None:
            groups = found.groupdict()
            project = project or _group(_PROJECT, text) or "PROJECT"
            advice = rule.advice.format(
                project=project,
                api=_group(_API, text) or "compute.googleapis.com",
                bucket=groups.get("bucket") or groups.get("other") or "NAME",
                policy_fix=policy_fix(groups.get("constraint") or ""),
                role_advice=_role_advice(text, project),
                credentials=credentials,
                machine=_group(_INSTANCE, text) or "NAME",
                **{
                    name: groups.get(name) or name.upper()
                    for name in ("kind", "user", "most", "type", "state")
                },
            )
            return Refusal(error=rule.error, advice=advice)
    return None


def _group(pattern: re.Pattern[str], text: str) -> str:
    """Return the first group that matched; empty if no group matched."""
    found = pattern.search(text)
    return next((each for each in found.groups() if each), "") if found else ""


def _role_advice(text: str, project: str) -> str:
    permission = _group(_PERMISSION, text)
    reads = permission.endswith((".get", ".list"))
    service = permission.partition(".")[0]
    role = (_READERS.get(service) if reads else None) or _ROLES.get(service)
    if role is None:
        return "Request the roles in docs/guides/roles.md"
    return (
        f"{permission} is in {role}. The project's owner must run: gcloud projects "
        f"add-iam-policy-binding {project} --member=user:YOU --role={role}"
    )
